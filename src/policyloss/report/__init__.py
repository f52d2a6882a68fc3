"""Run directories → plain data (`collect`) → one HTML file that opens offline (`render`). Needs
nothing beyond the core.
"""

from policyloss.report.collect import collect
from policyloss.report.inline import show
from policyloss.report.render import render
from policyloss.report.write import write_report

__all__ = ["collect", "render", "show", "write_report"]
