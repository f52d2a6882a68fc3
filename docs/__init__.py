"""The documentation, and the programs and data that its generated pages are made from.
Nothing of it is installed.
"""
