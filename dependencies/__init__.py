"""What this project depends on: the list with licences (docs/dependencies.md) and the lock with
hashes (requirements.lock).
"""
