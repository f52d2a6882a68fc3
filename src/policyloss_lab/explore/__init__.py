"""`policyloss explore`: an offline page to experiment with losses."""

from policyloss_lab.explore.page import explorer_page

__all__ = ["explorer_page"]
