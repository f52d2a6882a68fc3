"""The dependencies of this project: the list with licences (docs/dependencies.md) and the lock with
hashes (requirements.lock).
"""
