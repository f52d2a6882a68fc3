"""Benchmarks: one command per machine kind. Every provider is checked before it is timed."""
