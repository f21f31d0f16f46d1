"""One loop, several recipes: vanilla, layer norm, adversarial and faithful training, defences."""

from fgai.training.adversarial import Adversarial
from fgai.training.checkpoint import load, read_header, save
from fgai.training.defended import Regularised
from fgai.training.faithful import Faithful, make_faithful
from fgai.training.loop import History, Recipe, TrainConfig, fit, seeded
from fgai.training.methods import ALONE, METHODS, settings_for, train_method, untrained
from fgai.training.presets import preset
from fgai.training.recipes import Vanilla, labelled
from fgai.training.settings import FaithfulConfig
from fgai.training.terms import TERMS
from fgai.training.train import history_of, train

__all__ = [
    "ALONE",
    "METHODS",
    "TERMS",
    "Adversarial",
    "Faithful",
    "FaithfulConfig",
    "History",
    "Recipe",
    "Regularised",
    "TrainConfig",
    "Vanilla",
    "fit",
    "history_of",
    "labelled",
    "load",
    "make_faithful",
    "preset",
    "read_header",
    "save",
    "seeded",
    "settings_for",
    "train",
    "train_method",
    "untrained",
]
