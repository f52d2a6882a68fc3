"""Reads what trainers of any kind write down: numbers over steps, and completions."""
