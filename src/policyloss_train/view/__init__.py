"""Views of a run: the terminal, trackers, and the log of single tokens."""
