"""Builds a release and checks it."""
