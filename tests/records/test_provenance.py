"""Every record names its weights, data, code, date, command and seed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from fgai.certificates import CertificateRecord, InjectionCertificate
from fgai.errors import CheckpointError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.records import provenance, weights_hash
from fgai.records.provenance import code_hash
from fgai.version import __version__, adding_facts
from support.graph_cases import small_data

pytestmark = pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")
GRAPH = small_data()
QUICK = {"curves": False, "nulls": False, "explanation_attack": False, "nodes": 2, "edges": 2}


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return fgai.GAT.for_data(GRAPH, hidden_channels=2, heads=2).eval()


class TestWeights:
    def test_name_values_shapes_and_types(self) -> None:
        plain = torch.nn.Linear(2, 3)
        assert len(weights_hash(plain)) == 64
        same = torch.nn.Linear(2, 3)
        same.load_state_dict(plain.state_dict())
        assert weights_hash(same) == weights_hash(plain)
        with torch.no_grad():
            same.weight[0, 0] += 1e-3
        others = [same, plain.double(), torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.nn.Linear(3, 2)]
        assert len({weights_hash(other) for other in others}) == len(others)

    def test_any_tensor_and_module(self) -> None:
        holder = torch.nn.Module()
        holder.register_buffer("a", torch.ones(3, 4).t())
        holder.register_buffer("b", torch.tensor(2.0, dtype=torch.bfloat16))
        holder.register_buffer("c", torch.eye(3).to_sparse())
        holder.register_buffer("d", torch.zeros(0))
        holder.get_extra_state = lambda: {"anything": object()}
        assert weights_hash(holder) == weights_hash(holder)
        contiguous = torch.nn.Module()
        for name, value in (("a", torch.ones(4, 3)), *(list(holder.named_buffers())[1:])):
            contiguous.register_buffer(name, value)
        assert weights_hash(contiguous) == weights_hash(holder)


def test_the_block() -> None:
    block = provenance(model(), "abc", command="fgai.evaluate", seed=3)
    assert block["weights"] == weights_hash(model()) and block["data"] == "abc" and block["seed"] == 3
    assert block["code"] == code_hash() and len(code_hash()) == 64 and block["version"] == __version__
    date = datetime.fromisoformat(block["date"])
    assert date.tzinfo is not None and datetime.now(UTC) - date < timedelta(minutes=5)
    assert block["command"] == "fgai.evaluate" and "note" not in block
    with adding_facts(command="fgai x", note="untrained weights"), adding_facts(command="inner"):
        block = provenance(model(), "abc", command="fgai.evaluate")
    assert block["command"] == "fgai x" and block["note"] == "untrained weights" and block["seed"] is None
    assert provenance(model(), "abc", command="c")["command"] == "c"


def test_every_record_has_one(tmp_path: Path) -> None:
    made = model()
    evaluation = fgai.evaluate(made, GRAPH, "random", seed=4, **QUICK)
    comparison = fgai.compare({"A": made, "B": model(1)}, GRAPH, "random", **QUICK)
    ball, injected = fgai.certify_attention(made, GRAPH, radius=0.1), fgai.certify_injection(made, GRAPH)
    blocks = [evaluation.provenance, comparison["A"].provenance, ball.provenance, injected.provenance]
    assert {block["weights"] for block in blocks} == {weights_hash(made)}
    assert comparison["B"].provenance["weights"] == weights_hash(model(1)) != weights_hash(made)
    assert {block["data"] for block in blocks} == {fgai.datasets.fingerprint(GRAPH)}
    assert [block["seed"] for block in blocks] == [4, 0, None, None]
    commands = ["fgai.evaluate", "fgai.compare", "fgai.certify_attention", "fgai.certify_injection"]
    assert [block["command"] for block in blocks] == commands
    for record in (evaluation, ball, injected):
        again = type(record).load(record.save(tmp_path / "record.json"))
        assert again.provenance == record.provenance


def test_two_runs_differ_in_nothing_else() -> None:
    one, two = (fgai.evaluate(model(), GRAPH, "random", **QUICK).to_dict() for _ in range(2))
    assert one.pop("provenance").keys() == two.pop("provenance").keys()
    for record in (one, two):
        del record["seconds"], record["peak_memory"], record["ledgers"]["prediction"]["seconds"]
    assert one == two


def test_records_without_it_are_read(tmp_path: Path) -> None:
    values = fgai.evaluate(model(), GRAPH, "random", **QUICK).to_dict()
    del values["provenance"]
    assert EvaluationRecord.from_dict(values).provenance == {}
    both = {"kind": "comparison", "schema": 1, "reference": values["name"], "records": [values]}
    (tmp_path / "both.json").write_text(json.dumps(both))
    assert Comparison.load(tmp_path / "both.json").records[0].provenance == {}


@pytest.mark.parametrize("kind", [EvaluationRecord, CertificateRecord, InjectionCertificate])
def test_files_that_were_changed_are_refused(kind: Any, tmp_path: Path) -> None:
    made = {
        EvaluationRecord: lambda: fgai.evaluate(model(), GRAPH, "random", **QUICK),
        CertificateRecord: lambda: fgai.certify_attention(model(), GRAPH, radius=0.1),
        InjectionCertificate: lambda: fgai.certify_injection(model(), GRAPH),
    }[kind]()
    path = made.save(tmp_path / "record.json")
    values = json.loads(path.read_text())
    assert values["provenance"]["weights"] == weights_hash(model())
    values["model"]["class"] = "GATv2"
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="checksum"):
        kind.load(path)
    del values["checksum"]
    path.write_text(json.dumps(values))
    assert kind.load(path).model["class"] == "GATv2"
