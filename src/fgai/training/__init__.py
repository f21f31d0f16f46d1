"""One loop, several recipes: vanilla, layer norm, adversarial and faithful training, defences."""

from fgai.alone import seeded
from fgai.training.adversarial import Adversarial
from fgai.training.ascent import Ascent
from fgai.training.attempts import make_faithful
from fgai.training.build import ALONE, METHODS, setting_names, untrained
from fgai.training.checkpoint import load_model, read_header, save_model
from fgai.training.defended import Regularised
from fgai.training.factory import make_model
from fgai.training.faithful import Faithful
from fgai.training.features import features_alone
from fgai.training.history import History
from fgai.training.limiting import Clipped, clipped, limit
from fgai.training.loop import Recipe, TrainConfig, fit
from fgai.training.methods import VARIANTS, settings_for, train_method
from fgai.training.presets import preset
from fgai.training.recipes import Vanilla, labelled
from fgai.training.settings import FaithfulConfig
from fgai.training.terms import TERMS
from fgai.training.train import history_of, train

__all__ = [
    "ALONE",
    "METHODS",
    "TERMS",
    "VARIANTS",
    "Adversarial",
    "Ascent",
    "Clipped",
    "Faithful",
    "FaithfulConfig",
    "History",
    "Recipe",
    "Regularised",
    "TrainConfig",
    "Vanilla",
    "clipped",
    "features_alone",
    "fit",
    "history_of",
    "labelled",
    "limit",
    "load_model",
    "make_faithful",
    "make_model",
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
