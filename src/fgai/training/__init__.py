"""One loop, several recipes: vanilla, layer norm, adversarial and faithful training."""

from fgai.alone import seeded
from fgai.training.capture import Drawn
from fgai.training.checkpoint import load_model, make_model, pretrained_names, read_header, save_model
from fgai.training.faithful import Faithful, make_faithful
from fgai.training.hardening import Adversarial, harden
from fgai.training.limiting import Clipped, clipped, limit
from fgai.training.loop import Recipe, Step, TrainConfig, epoch_seed, fit
from fgai.training.methods import check_method, features_alone, train_method
from fgai.training.recipes import Vanilla, labelled
from fgai.training.resume import History, history_of
from fgai.training.settings import CERTIFIED, FaithfulSettings, HardenSettings
from fgai.training.targets import Targets
from fgai.training.terms import StepContext, Term, certified, term
from fgai.training.train import ALONE, METHODS, setting_names, train, untrained

__all__ = [
    "ALONE",
    "CERTIFIED",
    "METHODS",
    "Adversarial",
    "Clipped",
    "Drawn",
    "Faithful",
    "FaithfulSettings",
    "HardenSettings",
    "History",
    "Recipe",
    "Step",
    "StepContext",
    "Targets",
    "Term",
    "TrainConfig",
    "Vanilla",
    "certified",
    "check_method",
    "clipped",
    "epoch_seed",
    "features_alone",
    "fit",
    "harden",
    "history_of",
    "labelled",
    "limit",
    "load_model",
    "make_faithful",
    "make_model",
    "pretrained_names",
    "read_header",
    "save_model",
    "seeded",
    "setting_names",
    "term",
    "train",
    "train_method",
    "untrained",
]
