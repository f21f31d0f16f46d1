"""`record`: see, and change, the attention of a model for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fgai.alone import alone
from fgai.attention.perturb import PerturbLike
from fgai.attention.registry import adapter_for, known_layers
from fgai.attention.tap import EdgeType, NodeCount, Scores, Tap
from fgai.attention.tape import Tape
from fgai.attention.wrapped import layout_of, model_name, uncompiled, unwrapped
from fgai.errors import AttentionError
from fgai.sparse import Adjacency
from fgai.typed import typed

_HETERO = "heterogeneous models are recorded with their data, see `fgai.hetero`"
_REFUSED = {
    "HeteroConv": _HETERO,
    "HGTConv": _HETERO,
    "HANConv": _HETERO,
    "DataParallel": "replicated models cannot be recorded",
}


@typed
@contextmanager
def record(model: nn.Module, *, perturb: PerturbLike | None = None, ranked: bool = True) -> Iterator[Tape]:
    """Record the attention of `model`, and perturb it if asked, while the block runs.

    Works for fgai's models and for any model built from GATConv, GATv2Conv, TransformerConv or SuperGATConv
    (`register_adapter` adds others). Attention is taken after the softmax and before dropout, in training and
    in evaluation mode, on the edges the layer really used, self-loops it added included, sorted by
    (destination, source). A layer that runs twice in a forward gives two entries, `"conv"` and `"conv:2"`.

    The model is unchanged afterwards, also when its forward raises; random numbers are drawn as without
    recording. Blocks may be nested: the outer one perturbs first. Compiled models run uncompiled inside the
    block; autocast works, and attention keeps the type the layer computed it in. Do not copy or pickle the
    model inside the block, nor call it from another thread: that raises. Blocks in other threads wait.

    Args:
        model: any module.
        perturb: what to change, see `Perturbation`: a function `(layer number, attention [E, H], source,
            destination) → attention`, or deltas to add, as `{layer number: delta}`, one per layer, or an
            `AttentionMap`. Layers are numbered in the order they run. None records only.
        ranked: also keep the scores neighbours are ranked by, see `LayerAttention.ranking`.

    Yields:
        The tape; `tape.attention` is the `AttentionMap` of the last forward.

    Raises:
        AttentionError: the model has no layer with attention, or one that cannot be recorded (scripted,
            heterogeneous, a subclass that hides its attention); in the forward: bipartite input, unsupported
            edges, a perturbation that does not fit.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import GATConv
        >>> conv = GATConv(3, 2, heads=2).eval()
        >>> with record(conv) as tape:
        ...     out = conv(torch.ones(4, 3), torch.tensor([[0, 1], [2, 2]]))
        >>> tape.attention.last.source.tolist(), tape.attention.last.destination.tolist()
        ([0, 1, 0, 1, 2, 3], [0, 1, 2, 2, 2, 3])
    """
    if torch.compiler.is_compiling():
        raise AttentionError("`record` cannot be compiled; open it outside `torch.compile`")
    model = uncompiled(model)
    layers = find_layers(model)
    tape = Tape(perturb, ranked=ranked, layout=layout_of(model))
    with alone(), ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing can have been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        begin = model.register_forward_pre_hook(
            lambda _, args, kwargs: tape.begin(args, kwargs), with_kwargs=True
        )
        stack.callback(begin.remove)
        for name, layer in layers.items():
            stack.enter_context(_tapped(layer, name, tape))
        finish = model.register_forward_hook(lambda *_: tape.finish())
        stack.callback(finish.remove)
        end = model.register_forward_hook(lambda *_: tape.end(), always_call=True)
        stack.callback(end.remove)
        yield tape


@typed
def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers of a model by name; those of a wrapped one by their names inside.

    Raises:
        AttentionError: there is none, or the model is scripted, or heterogeneous and not one of
            `fgai.hetero`.
    """
    found: dict[str, nn.Module] = {}
    seen: set[str] = set()
    hetero = layout_of(model) is not None
    for path, module in unwrapped(model).named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise AttentionError(f"{path or 'the model'} is scripted by TorchScript and cannot be recorded")
        if kind in _REFUSED and not (hetero and _REFUSED[kind] is _HETERO):
            raise AttentionError(f"{path or 'the model'} is a {kind}: {_REFUSED[kind]}")
        if adapter_for(module) is not None and "_orig_mod" not in module._modules:
            found[path.replace("_orig_mod.", "").removesuffix("._orig_mod") or kind] = module
        seen.add(kind)
    if not found:
        raise AttentionError(
            f"{model_name(model)} has no attention layer fgai knows ({', '.join(known_layers())});"
            f" looked at: {', '.join(sorted(seen))}; see `fgai.attention.register_adapter`"
        )
    return found


@dataclass
class _Installed:
    """An adapter that is open on a layer, and the taps it feeds, outermost block first.

    With each stands whether it perturbs.
    """

    adapter: AbstractContextManager[None] | None = None
    taps: list[tuple[Tap, bool]] = field(default_factory=list)

    def tap(
        self,
        attention: Tensor,
        source: Tensor,
        destination: Tensor,
        num_nodes: NodeCount,
        *,
        adjacency: Adjacency | None = None,
        scores: Scores | None = None,
        edge_type: EdgeType | None = None,
    ) -> Tensor:
        ends = source, destination, num_nodes
        for tap, perturbs in tuple(self.taps):
            attention = tap(attention, *ends, adjacency=adjacency, scores=scores, edge_type=edge_type)
            scores = None if perturbs else scores  # of what was changed they say nothing
        return attention


_INSTALLED: WeakKeyDictionary[nn.Module, _Installed] = WeakKeyDictionary()


@contextmanager
def _tapped(layer: nn.Module, name: str, tape: Tape) -> Iterator[None]:
    """Let `tape` see every run of `layer`, and make sure each run shows its attention."""
    runs = [0]

    def tap(
        attention: Tensor,
        source: Tensor,
        destination: Tensor,
        num_nodes: NodeCount,
        *,
        adjacency: Adjacency | None = None,
        scores: Scores | None = None,
        edge_type: EdgeType | None = None,
    ) -> Tensor:
        runs[0] += 1
        return tape.tap(name, attention, source, destination, num_nodes, adjacency, scores, edge_type)

    def before(*_: Any) -> None:
        runs[0] = 0

    def after(module: nn.Module, *_: Any) -> None:
        if runs[0] == 0:
            raise AttentionError(
                f"layer {name!r} ({type(module).__name__}) ran without showing its attention;"
                " give it an adapter of its own with `fgai.attention.register_adapter`"
            )

    with ExitStack() as stack:
        stack.enter_context(_installed(layer, tap, tape.perturbs))
        stack.callback(layer.register_forward_pre_hook(before).remove)
        stack.callback(layer.register_forward_hook(after).remove)
        yield


@contextmanager
def _installed(layer: nn.Module, tap: Tap, perturbs: bool) -> Iterator[None]:
    installed = _INSTALLED.get(layer)
    if installed is None:
        installed = _Installed()
        adapter = adapter_for(layer)
        assert adapter is not None
        installed.adapter = adapter(layer, installed.tap)
        installed.adapter.__enter__()
        _INSTALLED[layer] = installed
    installed.taps.append((tap, perturbs))
    try:
        yield
    finally:
        installed.taps.remove((tap, perturbs))
        if not installed.taps:
            del _INSTALLED[layer]
            if installed.adapter is not None:
                installed.adapter.__exit__(None, None, None)
