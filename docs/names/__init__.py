"""The frameworks' names of the options of a loss, and names with two meanings: the data of
docs/names.md.
"""
