"""`policyloss explore`: the losses as a page to play with, which opens offline."""

from policyloss_lab.explore.page import explorer_page

__all__ = ["explorer_page"]
