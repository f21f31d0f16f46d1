"""Packages that fgai can use and does not need; without one, the line that installs it is said."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fgai.errors import MissingExtraError

EXTRAS = {
    "captum": "explainers",
    "plotly": "report",
    "huggingface_hub": "hub",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "pyarrow": "parquet",
}
"""Package → the extra of fgai that installs it."""


def extra(module: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingExtraError: it is not installed; the message holds the install line.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, EXTRAS[package]) from error
