"""The library, the command line and the demo say the same numbers for the same seed, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fgai.evaluation import Comparison
from support.cli_cases import fgai

EPOCHS = 2
SMALL = """
from fgai.datasets import Source, loader, planted, registry
loader._check_sizes = lambda *given: None
registry._SOURCES["planted"] = Source(make=lambda: planted(num_nodes=300))
"""
LIBRARY = f"""
import fgai
data = fgai.load_dataset("planted")
model = fgai.train("GAT", data, epochs={EPOCHS}, progress=False)
faithful = fgai.make_faithful(model, data, epochs={EPOCHS}, progress=False)
fgai.compare({{"GAT": model, "FGAI": faithful}}, data).save("library.json")
"""


def answer(*words: object, cwd: Path) -> dict[str, Any]:
    """Run a command on the smaller graph."""
    argv = ["fgai", *map(str, words), "--json"]
    run = f"import sys\nfrom fgai.cli import main\nsys.argv = {argv}\nmain()\n"
    done = fgai("-c", SMALL + run, cwd=cwd)
    assert done.code == 0, done.err
    return json.loads(done.out)


def said(path: Path) -> dict[str, Any]:
    """Metrics by model, without where they were measured and how long it took."""
    return {record.name: record.to_dict()["metrics"] for record in Comparison.load(path).records}


def test_three_ways_to_one_number(tmp_path: Path) -> None:
    done = fgai("-c", SMALL + LIBRARY, cwd=tmp_path)
    assert done.code == 0, done.err
    answer("train", "--epochs", EPOCHS, "-o", "gat.safetensors", cwd=tmp_path)
    answer("faithful", "gat.safetensors", "--epochs", EPOCHS, "-o", "fgai.safetensors", cwd=tmp_path)
    answer("compare", "GAT=gat.safetensors", "FGAI=fgai.safetensors", "-o", "both.json", cwd=tmp_path)
    demo = answer("demo", "--epochs", EPOCHS, "-o", "out", cwd=tmp_path)
    library = said(tmp_path / "library.json")
    assert said(tmp_path / "both.json") == library
    assert said(tmp_path / demo["comparison"]) == library
    whole(demo, tmp_path)


def whole(demo: dict[str, Any], folder: Path) -> None:
    """The demo answers in words, and every file it names is there."""
    kinds = {row["measure"]: row["change"] for row in demo["table"]}
    assert len(kinds) == 11 and set(kinds.values()) <= {"better", "as before", "worse"}
    assert "right under attack" in kinds and "measures got better" in demo["meaning"]
    shares = {name: demo["definition"][name]["all_four"] for name in ("GAT", "FGAI")}
    assert all(f"{share:.0%} of the nodes of {name}" in demo["meaning"] for name, share in shares.items())
    for path in [*demo["pictures"], *demo["models"].values(), demo["comparison"]]:
        assert (folder / path).stat().st_size > 1000
    assert not list((folder / "out").glob("*.partial"))
