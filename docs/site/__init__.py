"""The documentation site: `make site` assembles it from the pages, the data and the docstrings."""
