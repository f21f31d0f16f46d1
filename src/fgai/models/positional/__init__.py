"""Laplacian encodings: where a node sits in its component, the same on every run."""

from fgai.graph.nystrom import extend_encoding
from fgai.models.positional.encoding import Encoding, laplacian_encoding, with_encoding

__all__ = ["Encoding", "extend_encoding", "laplacian_encoding", "with_encoding"]
