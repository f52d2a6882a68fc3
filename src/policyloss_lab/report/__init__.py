"""Runs of any trainer → plain data (`collect`) → one HTML file that opens offline (`render`)."""

from policyloss_lab.report.data import collect
from policyloss_lab.report.page import render, show, write_report

__all__ = ["collect", "render", "show", "write_report"]
