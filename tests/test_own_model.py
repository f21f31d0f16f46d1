"""A user's own trained model with edge features, all the way: the whole journey in a few lines."""

from __future__ import annotations

from pathlib import Path

import fgai
from support import attack_cases as cases
from support.own_cases import OwnNet, own_accuracy, own_data, own_model


def test_a_model_of_your_own_all_the_way(tmp_path: Path) -> None:
    model, data = own_model(), own_data()  # GATv2Conv(edge_dim=2), trained by a loop of the user's
    size = {"nodes": 2, "edges": 3, "k": 2}
    with cases.quiet():
        record = fgai.evaluate(model, data, "standard", curves=False, nulls=False, **size)
        faithful = fgai.make_faithful(model, data, epochs=3, nodes=2, edges=3, progress=False)
        explained = fgai.explain(faithful, data, node=3, **size)
        certificate = fgai.certify_attention(faithful, data, vanilla=model, radius=0.01)
        injected = fgai.certify_injection(faithful, data, neighbours=1)
        page = fgai.report(faithful, data, tmp_path / "page.html", threat="random", **size)
        path = fgai.save_model(faithful, tmp_path / "mine", factory=OwnNet)
        back = fgai.load_model(path, factory=OwnNet)
    assert record.metrics["f1"]["clean"] == own_accuracy(model, data)
    assert sum(entry["attention"] for entry in explained.neighbours) > 0.99
    assert [layer.prediction.class_status for layer in certificate.layers] == ["unknown", "exact"]
    assert not injected.known and str(injected.reason).startswith("values on edges")
    assert page.names == ["OwnNet"] and (tmp_path / "page.html").stat().st_size > 100_000
    fields = data.x, data.edge_index, data.edge_attr
    assert (back(*fields) == faithful(*fields)).all()
