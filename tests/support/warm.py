"""Imported before commands are forked: they inherit compiled kernels and what is slow to import."""

from __future__ import annotations

import torch

import fgai.reports.figures  # noqa: F401, slow to import
from fgai.cli.data import CHECKS
from fgai.errors import collect_warnings
from fgai.progress import show_progress

if not torch.cuda.is_available():  # a process that used a GPU cannot be forked
    with collect_warnings(), show_progress(False):
        CHECKS["end to end"]()
