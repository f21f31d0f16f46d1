"""Training: `train`, `make_faithful`, `harden`, `limit`; loss terms; and models saved in files."""

from fgai.training.faithful import FaithfulRecipe, make_faithful
from fgai.training.hardening import AdversarialRecipe, harden
from fgai.training.limiting import ClipCount, count_clipped, limit
from fgai.training.loop import fit
from fgai.training.methods import (
    FROM_SCRATCH,
    METHODS,
    accuracy_without_edges,
    check_method,
    setting_names,
    train,
    train_method,
    untrained_model,
)
from fgai.training.model_file import load_model, make_model, pretrained_names, read_header, save_model
from fgai.training.recipes import Draws, Recipe, Step, VanillaRecipe, epoch_seed, labelled_rows
from fgai.training.resume import History, history_of
from fgai.training.settings import CERTIFIED_SETTINGS, FaithfulSettings, HardenSettings, TrainConfig
from fgai.training.terms import StepContext, Term, VanillaOutputs, certified, term

__all__ = [
    "CERTIFIED_SETTINGS",
    "FROM_SCRATCH",
    "METHODS",
    "AdversarialRecipe",
    "ClipCount",
    "Draws",
    "FaithfulRecipe",
    "FaithfulSettings",
    "HardenSettings",
    "History",
    "Recipe",
    "Step",
    "StepContext",
    "Term",
    "TrainConfig",
    "VanillaOutputs",
    "VanillaRecipe",
    "accuracy_without_edges",
    "certified",
    "check_method",
    "count_clipped",
    "epoch_seed",
    "fit",
    "harden",
    "history_of",
    "labelled_rows",
    "limit",
    "load_model",
    "make_faithful",
    "make_model",
    "pretrained_names",
    "read_header",
    "save_model",
    "setting_names",
    "term",
    "train",
    "train_method",
    "untrained_model",
]
