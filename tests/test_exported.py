"""Compiled models are used as they were before; models behind limits are exported like PyG's own layers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv, GATv2Conv

import fgai
from fgai.attention import limits_of
from fgai.errors import FgaiWarning
from support.graph_cases import small_data


class Net(nn.Module):
    def __init__(self, conv: type[Any], width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = conv(width, 4, heads=2), conv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.second(elu(self.first(x, edge_index)), edge_index)


def made(conv: type[Any] = GATConv) -> tuple[Net, Any]:
    torch.manual_seed(0)
    data = small_data().to_data()
    return Net(conv, data.num_features, int(data.y.max()) + 1).eval(), data


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "explain": lambda model, data: fgai.explain(model, data, 3, nodes=2, edges=2).neighbours,
    "evaluate": lambda model, data: fgai.evaluate(
        model, data, "random", vanilla=model, nodes=2, edges=2, curves=False
    ).value("f1.attacked"),
    "compare": lambda model, data: (
        fgai.compare({"one": model, "two": model}, data, "random", nodes=2, edges=2, curves=False)
        .records[1]
        .value("f1.attacked")
    ),
    "certify_attention": lambda model, data: fgai.certify_attention(model, data, vanilla=model).shares(),
    "certify_injection": lambda model, data: fgai.certify_injection(model, data).reason,
    "limit": fgai.limit,
    "harden": lambda model, data: fgai.harden(model, data, epochs=1, nodes=2, edges=2, progress=False),
    "make_faithful": lambda model, data: fgai.make_faithful(
        model, data, epochs=1, nodes=2, edges=2, check=False, progress=False
    ),
}


@pytest.mark.many
@pytest.mark.filterwarnings("ignore:.*(flat-attention|weak-attention|chance-level)")
@pytest.mark.parametrize("name", CALLS)
def test_of_a_compiled_model_the_original_is_used_with_one_note(name: str) -> None:
    model, data = made()

    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("the compiled model ran")

    compiled: Any = torch.compile(model, backend=refuse)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        found = CALLS[name](compiled, data)
    assert [str(one.message)[:15] for one in notes if "compiled" in str(one.message)] == ["Net is compiled"]
    assert all(isinstance(one.message, FgaiWarning) for one in notes if "compiled" in str(one.message))
    wanted = CALLS[name](model, data)
    if isinstance(wanted, nn.Module):
        assert type(found) is Net and found is not model
        for key, value in wanted.state_dict().items():
            assert torch.equal(value, found.state_dict()[key])
    else:
        assert found == wanted


def exported(model: nn.Module, given: tuple[Tensor, ...], **options: Any) -> Any:
    automatic: Any = torch.export.Dim.AUTO
    shapes = ({0: automatic}, {1: automatic})
    return torch.export.export(model, given, dynamic_shapes=shapes, **options).module()


def traced(model: nn.Module, given: tuple[Tensor, ...]) -> Any:
    memory = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, given), memory)
    memory.seek(0)
    return torch.jit.load(memory)


EXPORTS: dict[str, Callable[..., Any]] = {
    "export": exported,
    "strict export": lambda model, given: exported(model, given, strict=True),
    "trace": traced,
    "compile": lambda model, given: torch.compile(model, backend="eager", fullgraph=True),
}


@pytest.mark.many
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize(("conv", "grad"), [(GATConv, True), (GATv2Conv, False)])
def test_models_behind_limits_are_exported(conv: type[Any], how: str, grad: bool) -> None:
    model, data = made(conv)
    limited = fgai.limit(model, data)
    given = data.x, data.edge_index
    with torch.set_grad_enabled(grad):
        found = EXPORTS[how](limited, given)
    with torch.no_grad():
        assert torch.allclose(found(*given), limited(*given), atol=1e-6)
        far = 1e4 * data.x, data.edge_index  # limits act
        assert torch.allclose(found(*far), limited(*far), atol=1e-5)
        assert not torch.allclose(model(*far), limited(*far), atol=1.0)
        if how != "trace":  # a trace keeps the number of nodes, as one of PyG's own layer does
            fewer = data.x[:-4], data.edge_index[:, (data.edge_index < len(data.x) - 4).all(0)]
            assert torch.allclose(found(*fewer), limited(*fewer), atol=1e-6)
    torch.compiler.reset()


def test_exports_hold_no_operation_that_onnx_lacks() -> None:
    model, data = made()
    program = torch.export.export(fgai.limit(model, data), (data.x, data.edge_index))
    operations = {str(node.target) for node in program.run_decompositions().graph.nodes}
    assert "aten.where.self" in operations and not any("fmax" in one or "fmin" in one for one in operations)


@pytest.mark.skipif(
    not all(map(find_spec, ("onnxscript", "onnxruntime"))), reason="onnxscript, onnxruntime not installed"
)
def test_models_behind_limits_are_exported_to_onnx() -> None:
    import onnxruntime

    model, data = made()
    limited = fgai.limit(model, data)
    given = data.x, data.edge_index
    program = torch.onnx.export(limited, given, dynamo=True)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [one.name for one in session.get_inputs()]
    with torch.no_grad():
        for x in (data.x, 1e4 * data.x):
            rows = session.run(None, dict(zip(names, (x.numpy(), data.edge_index.numpy()), strict=True)))[0]
            assert torch.allclose(torch.from_numpy(rows), limited(x, data.edge_index), atol=1e-5)


def test_weights_go_back_to_plain_layers() -> None:
    model, data = made()
    limited = fgai.limit(fgai.wrap(model, lambda net, graph: net(graph.x, graph.edge_index)), data)
    plain, _ = made()
    state = limited.model.state_dict()
    plain.load_state_dict({key: value for key, value in state.items() if ".limits." not in key})
    again = fgai.limit(plain, data)
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again(data.x, data.edge_index), limited(data))
    assert len(limits_of(again)) == 2 and limits_of(plain) == []
