"""One loop, several recipes: vanilla, layer norm, adversarial and faithful training."""

from fgai.alone import seeded
from fgai.training.adversarial import Adversarial
from fgai.training.attempts import make_faithful
from fgai.training.capture import Drawn
from fgai.training.checkpoint import load_model, make_model, read_header, save_model
from fgai.training.faithful import Faithful
from fgai.training.limiting import Clipped, clipped, limit
from fgai.training.loop import Recipe, TrainConfig, epoch_seed, fit
from fgai.training.methods import check_method, features_alone, settings_for, train_method
from fgai.training.recipes import Vanilla, labelled
from fgai.training.resume import History, history_of
from fgai.training.settings import FaithfulConfig, preset
from fgai.training.terms import TERMS, prediction_distance
from fgai.training.train import ALONE, METHODS, setting_names, train, untrained

__all__ = [
    "ALONE",
    "METHODS",
    "TERMS",
    "Adversarial",
    "Clipped",
    "Drawn",
    "Faithful",
    "FaithfulConfig",
    "History",
    "Recipe",
    "TrainConfig",
    "Vanilla",
    "check_method",
    "clipped",
    "epoch_seed",
    "features_alone",
    "fit",
    "history_of",
    "labelled",
    "limit",
    "load_model",
    "make_faithful",
    "make_model",
    "prediction_distance",
    "preset",
    "read_header",
    "save_model",
    "seeded",
    "setting_names",
    "settings_for",
    "train",
    "train_method",
    "untrained",
]
