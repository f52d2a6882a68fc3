"""Differential tests: every drop-in of `policyloss.compat` against the package it replaces. Run
`make conformance`.
"""
