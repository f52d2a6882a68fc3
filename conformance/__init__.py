"""Differential tests: every drop-in of `policyloss.compat` against the package it stands
in for. Run `make conformance`.
"""
