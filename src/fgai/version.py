"""Which fgai this is, and what a record says about the software it was made with."""

from __future__ import annotations

import torch

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of fgai and torch, as every record keeps them."""
    return {"fgai": __version__, "torch": torch.__version__}
