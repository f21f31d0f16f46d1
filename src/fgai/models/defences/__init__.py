"""Defences: models that re-weight the edges of every graph they are given."""

from fgai.models.defences.base import DEFENCES, Defended, register_defence
from fgai.models.defences.guard import GNNGuard
from fgai.models.defences.prognn import ProGNN
from fgai.models.defences.svd import GNNSVD

__all__ = ["DEFENCES", "GNNSVD", "Defended", "GNNGuard", "ProGNN", "register_defence"]
