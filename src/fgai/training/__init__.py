"""One loop, several recipes: vanilla, layer norm, adversarial and faithful training."""

from fgai.training.checkpoint import load, read_header, save
from fgai.training.loop import History, Recipe, TrainConfig, fit
from fgai.training.recipes import Vanilla
from fgai.training.train import train

__all__ = ["History", "Recipe", "TrainConfig", "Vanilla", "fit", "load", "read_header", "save", "train"]
