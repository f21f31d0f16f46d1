"""Reports, figures and cards: HTML pages, matplotlib figures and small checkable claims about a model."""

from fgai.reports.build import Report, make_report, read_report
from fgai.reports.cards.card import card  # not the module of the same name
from fgai.reports.compose import report
from fgai.reports.page import render, write_report
from fgai.reports.whatif import WhatIf, explore
from fgai.reports.words import missing

__all__ = [
    "Report", "WhatIf", "card", "explore", "make_report", "missing", "read_report", "render", "report",
    "write_report",
]  # fmt: skip
