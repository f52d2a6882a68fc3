"""`policyloss explore`: an offline page to experiment with losses."""
