"""Whether what an operation is given fits together: shapes, types, devices and indices.

Kernels read as far as the first array says, so every array must be as long. Shapes cost a comparison in each
call; indices are looked at once for an adjacency (see `fgai.sparse.valid`).
"""

from __future__ import annotations

from torch import Tensor

from fgai.errors import InputError
from fgai.ops.backend import kernels_for
from fgai.sparse import Adjacency


def check_edges(adjacency: Adjacency, like: Tensor) -> None:
    """Raise unless the edges point at nodes and are where `like` is."""
    adjacency.check_incoming()
    if adjacency.device != like.device:
        kernels_for(like)  # where a backend was forced, it is what does not fit
        raise InputError(
            f"the edges are on {adjacency.device} and the numbers on {like.device}; move one of them"
        )


def check_like(given: Tensor, name: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless `given` has this shape, and the type and device of `like`."""
    if given.shape != shape:
        raise InputError(f"`{name}` must have shape {list(shape)}, got {list(given.shape)}")
    if given.dtype != like.dtype or given.device != like.device:
        raise InputError(
            f"`{name}` must be {like.dtype} on {like.device}, as the others are,"
            f" got {given.dtype} on {given.device}"
        )


def check_numbers(given: Tensor, name: str, form: str) -> None:
    """Raise unless `given` holds floating-point numbers with as many axes as `form` has letters."""
    if given.dim() != len(form) or not given.is_floating_point():
        axes = ", ".join(form)
        raise InputError(
            f"`{name}` must be floating-point of shape [{axes}], got {given.dtype} {list(given.shape)}"
        )
