"""Which fgai this is, and what a record says about the software it was made with."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of fgai and torch, as every record keeps them."""
    import torch  # `import fgai` reads this file, and is not to wait for torch

    return {"fgai": __version__, "torch": torch.__version__}
