"""Reads the logs of any trainer: numbers over steps, and completions."""
