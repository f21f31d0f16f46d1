"""The report: one HTML page that shows what an attack did to predictions and explanations."""

from fgai.report.build import make_report
from fgai.report.document import Report
from fgai.report.page import render, write_report
from fgai.report.read import read_report
from fgai.report.words import missing

__all__ = ["Report", "make_report", "missing", "read_report", "render", "write_report"]
