"""What frameworks call the options of a loss, and which names mean two things:
the data of docs/names.md.
"""
