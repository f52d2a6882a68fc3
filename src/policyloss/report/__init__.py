"""Runs of any trainer → plain data (`collect`) → one HTML file that opens offline (`render`);
`Recorder` writes a run down from any loop. Needs nothing beyond the core.
"""

from policyloss.report.collect import collect
from policyloss.report.inline import show
from policyloss.report.recorder import Recorder
from policyloss.report.render import render
from policyloss.report.write import write_report

__all__ = ["Recorder", "collect", "render", "show", "write_report"]
