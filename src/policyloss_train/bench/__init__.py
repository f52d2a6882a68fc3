"""`policyloss bench`: train with a loss under several difficulties, next to other losses."""
