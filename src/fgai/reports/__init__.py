"""The report: one HTML page that shows what an attack did to predictions and explanations."""

from fgai.reports.build import make_report
from fgai.reports.compose import report
from fgai.reports.document import Report
from fgai.reports.page import render, write_report
from fgai.reports.read import read_report
from fgai.reports.words import missing

__all__ = ["Report", "make_report", "missing", "read_report", "render", "report", "write_report"]
