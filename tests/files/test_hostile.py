"""Files made to harm: bombs, escapes, other types, keys of a newer version. Each is refused, and cheaply."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as pack_tensors

from experiments import Cell, Store, read_grid, read_record
from fgai.certificates import CertificateRecord
from fgai.datasets.readers import _read_npz, _read_ogbn_arxiv, _read_planetoid, _read_tu
from fgai.datasets.unpickle import load_pickle
from fgai.errors import CheckpointError, DataError, FgaiError, InputError
from fgai.evaluation import EvaluationRecord
from fgai.explanations import NodeExplanation
from fgai.files import parse_json, read_arrays
from fgai.records import Document, pack_array, unpack_array
from fgai.training import load_model, save_model, train
from support import dataset_cases
from support.cli_cases import refused
from support.report_cases import certificates, comparison, whole_report
from support.training_cases import GRAPH, fresh, header_of

MOST = 320 << 20
"""Bytes that refusing a file may take at most."""
ZEROS = 1 << 28


def cheaply(read: Callable[[], Any], kind: type[FgaiError], message: str) -> None:
    """Assert that reading is refused, and that little memory was taken for it."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=message):
            read()
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def explained() -> NodeExplanation:
    return NodeExplanation(
        dataset="tiny",
        node=3,
        name="3",
        layer="mean",
        k=5,
        predicted=1,
        confidence=0.9,
        label=1,
        neighbours=[],
    )


def bomb() -> bytes:
    """Few bytes that hold very many zeros."""
    stream = zlib.compressobj(1)
    piece = bytes(1 << 24)
    return b"".join([*(stream.compress(piece) for _ in range(ZEROS >> 24)), stream.flush()])


class TestMemory:
    def test_packed_arrays(self, tmp_path: Path) -> None:
        data = base64.b64encode(bomb()).decode()
        values = certificates()["GAT"].to_dict()
        values["alpha1_logits"] = {"dtype": "<f8", "shape": [ZEROS // 8], "data": data}
        (tmp_path / "bomb.json").write_text(json.dumps(values))
        cheaply(lambda: CertificateRecord.load(tmp_path / "bomb.json"), CheckpointError, "can hold")
        liar = {"dtype": "<f8", "shape": [3], "data": data}
        cheaply(lambda: unpack_array(liar), CheckpointError, "do not hold 24")
        small = {"dtype": "<f8", "shape": [1 << 20], "data": "eJw="}
        many = {**comparison()["GAT"].to_dict(), "per_node": {f"a{i}": small for i in range(999)}}
        cheaply(lambda: EvaluationRecord.from_dict(many), CheckpointError, "can hold")

    def test_archives_of_arrays(self, tmp_path: Path) -> None:
        dataset_cases.write_npz(tmp_path / "good.npz")
        with np.load(tmp_path / "good.npz") as archive:
            parts = dict(archive)
        with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
            for name, array in parts.items():
                with out.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array)
                    if name == "labels":
                        for _ in range(ZEROS >> 24):
                            file.write(bytes(1 << 24))
        cheaply(lambda: _read_npz([tmp_path / "bomb.npz"]), DataError, "explains")
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 27,)}
        )
        with zipfile.ZipFile(tmp_path / "liar.npz", "w") as out:
            out.writestr("x.npy", header.getvalue() + bytes(64))
        with pytest.raises(ValueError, match="has 64 bytes"):
            read_arrays(tmp_path / "liar.npz", ["x"])

    def test_sizes_that_one_line_claims(self, tmp_path: Path) -> None:
        parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
        dataset_cases.write_planetoid(tmp_path, "tiny")
        files = [tmp_path / f"ind.tiny.{part}" for part in parts]
        lines = files[-1].read_text().split()
        lines[lines.index(max(lines, key=int))] = "999999999"
        files[-1].write_text("\n".join(lines))
        cheaply(lambda: _read_planetoid(files), DataError, "does not fit")
        dataset_cases.write_tu(tmp_path, "TINY")
        labels = tmp_path / "TINY_node_labels.txt"
        labels.write_text("\n".join(["30000000", *labels.read_text().split()[1:]]))
        cheaply(lambda: _read_tu(sorted(tmp_path.glob("TINY_*"))), DataError, "labels")
        tables = dataset_cases.ogb_tables()
        dataset_cases.write_ogb_zip(tmp_path / "arxiv.zip", tables)
        with zipfile.ZipFile(tmp_path / "arxiv.zip") as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        members["arxiv/raw/edge.csv.gz"] = gzip.compress(b"0,1\n" * (1 << 26), 1)
        with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as out:
            for name, content in members.items():
                out.writestr(name, content)
        cheaply(lambda: _read_ogbn_arxiv([tmp_path / "bomb.zip"]), DataError, "at most")

    def test_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "memo").write_bytes(b"\x80\x02]r\xff\xff\xff\x0f.")
        cheaply(lambda: load_pickle(tmp_path / "memo"), DataError, "numbers an entry")
        (tmp_path / "long").write_bytes(b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00x.")
        cheaply(lambda: load_pickle(tmp_path / "long"), DataError, "not a pickle")

    @pytest.mark.parametrize("size", ["hidden_channels", "in_channels", "heads", "num_layers"])
    def test_models_that_claim_to_be_large(self, tmp_path: Path, size: str) -> None:
        path = save_model(fresh(), tmp_path / "model")
        header = json.loads(header_of(path)["fgai"])
        header["config"][size] = 10**9
        path.write_bytes(pack_tensors(dict(fresh().state_dict()), {"fgai": json.dumps(header)}))
        cheaply(lambda: load_model(path), CheckpointError, "own architecture")


class TestGrids:
    @pytest.mark.parametrize(
        "line",
        [
            'dataset = "../../x"', 'dataset = "/tmp/x"', 'dataset = ["planted", "a/../../b"]', 'model = ".."',
            'dataset = "..\\\\x"', 'label = "a\\u0000b"', "seed = -1", "seed = 1.5", "seed = true",
            "threats = 3", "threats = [1]", 'settings = "x"', "wings = 2", f"label = '{'x' * 300}'",
        ],
    )  # fmt: skip
    def test_cells_that_are_none_are_refused(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "grid.toml").write_text(f"[[cells]]\n{line}\n")
        with pytest.raises(InputError):
            read_grid(tmp_path / "grid.toml")

    def test_so_does_the_command_line(self, tmp_path: Path) -> None:
        (tmp_path / "grid.toml").write_text('[[cells]]\ndataset = "../../x"\n')
        assert "dataset" in refused("bench", "run", "grid.toml", "--results", "deep/results", cwd=tmp_path)
        assert {path.name for path in tmp_path.iterdir()} <= {"grid.toml", "deep"}

    @pytest.mark.parametrize(
        "text", ["", "cells = 3", "cells = [1]", "other = 1", "[[cells]]\n[x]\n", "\xff"]
    )
    def test_other_files_are_no_grids(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "grid.toml").write_bytes(text.encode("latin1"))
        with pytest.raises(InputError):
            read_grid(tmp_path / "grid.toml")
        (tmp_path / "deep.toml").write_text("cells = " + "[" * 9999)
        with pytest.raises(InputError):
            read_grid(tmp_path / "deep.toml")

    def test_a_product_has_an_end(self, tmp_path: Path) -> None:
        many = ", ".join(map(str, range(2000)))
        text = f"[[cells]]\nseed = [{many}]\nmodel = [{', '.join(['1'] * 2000)}]\n"
        (tmp_path / "grid.toml").write_text(text)
        cheaply(lambda: read_grid(tmp_path / "grid.toml"), InputError, "4000000 cells")


class TestNewerAndOdd:
    def test_unknown_keys_and_other_types(self, tmp_path: Path) -> None:
        record = comparison()["GAT"].to_dict()
        for change in (
            {"wings": 2},
            {"seed": "0"},
            {"seconds": {"total": "x"}},
            {"metrics": []},
            {"seed": True},
        ):
            with pytest.raises(CheckpointError):
                EvaluationRecord.from_dict({**record, **change})
        proof = certificates()["GAT"].to_dict()
        wrong = pack_array(np.zeros(3))
        odd = [{"wings": 2}, {"layers": []}, {"layers": [1]}, {"alpha1_logits": wrong}, {"batch": wrong}]
        odd += [{"layers": [{**proof["layers"][0], "wings": 2}]}, {"radius": -1.0}, {"divergence": "x"}]
        for change in odd:
            with pytest.raises(CheckpointError):
                CertificateRecord.from_dict({**proof, **change})

    @pytest.mark.parametrize(
        "make",
        [comparison, lambda: comparison()["GAT"], lambda: certificates()["GAT"], whole_report, explained],
    )
    def test_a_part_that_is_missing_is_not_made_up(self, make: Callable[[], Document]) -> None:
        record = make()
        values = record.to_dict()
        optional = {"summary", "provenance", "explanation", "class_names", "contributions", "counterfactual"}
        for name in record.layout().keys() & values.keys() - optional:
            with pytest.raises(CheckpointError, match=f"lacks {name}"):
                type(record).from_dict({key: value for key, value in values.items() if key != name})

    def test_arrays_that_are_read_as_others(self) -> None:
        proof = certificates()["GAT"].to_dict()
        per_node = proof["layers"][0]["per_node"]
        for name, dtype in (("degree", "<f8"), ("costs", "<i8"), ("class_radius", "<i8")):
            layer = {**proof["layers"][0], "per_node": {**per_node, name: {**per_node[name], "dtype": dtype}}}
            with pytest.raises(CheckpointError, match=name):
                CertificateRecord.from_dict({**proof, "layers": [layer, *proof["layers"][1:]]})

    def test_models(self, tmp_path: Path) -> None:
        path = save_model(train(fresh(), GRAPH, epochs=2, progress=False), tmp_path / "model")
        header = json.loads(header_of(path)["fgai"])
        odd: list[dict[str, Any]] = [{"wings": 2}, {"config": []}, {"about": 3}, {"class": ["GAT"]}]
        odd += [{"history": {"wings": 2}}, {"history": {"terms": 3}}, {"history": {"scores": [[1]]}}]
        for change in odd:
            content = {"fgai": json.dumps({**header, **change})}
            path.write_bytes(pack_tensors(dict(fresh().state_dict()), content))
            with pytest.raises(CheckpointError):
                load_model(path)

    def test_a_changed_weight_or_setting_is_seen(self, tmp_path: Path) -> None:
        path = save_model(fresh(), tmp_path / "model")
        metadata, flipped = header_of(path), bytearray(path.read_bytes())
        flipped[-5] ^= 0x10
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="checksum"):
            load_model(path)
        header = json.loads(metadata["fgai"])
        header["config"]["dropout"] = 0.05
        path.write_bytes(pack_tensors(dict(fresh().state_dict()), {**metadata, "fgai": json.dumps(header)}))
        with pytest.raises(CheckpointError, match="checksum"):
            load_model(path)

    def test_states(self, tmp_path: Path) -> None:
        train(fresh(), GRAPH, epochs=2, progress=False, checkpoint=tmp_path)
        file = tmp_path / "training.safetensors"
        about = json.loads(header_of(file)["about"])
        tensors = dict(fresh().state_dict())
        parts = ("model", "best")
        whole = {f"{part}/{name}": value.clone() for part in parts for name, value in tensors.items()}
        shrunk = {name: value if "model" in name else torch.ones(2) for name, value in whole.items()}
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({**whole, "wings/x": torch.ones(2)}, about),
            (shrunk, about),
            ({**whole, "optimizer/0.exp_avg": torch.ones(2)}, about),
            ({**whole, "recipe/x": torch.ones(2)}, about),
            (whole, {**about, "epoch": "x"}),
            (whole, {**about, "history": {"wings": 1}}),
            (whole, {**about, "wings": 1}),
        ]
        for held, told in cases:
            file.write_bytes(pack_tensors(held, {"about": json.dumps(told)}))
            with pytest.raises(CheckpointError):
                train(fresh(), GRAPH, epochs=2, progress=False, checkpoint=tmp_path)

    def test_records_of_cells(self, tmp_path: Path) -> None:
        store, cell = Store(tmp_path), Cell()
        path = store.write(cell, {"status": "done", "seconds": 1.0})
        good = json.loads(path.read_text())
        for change in ({"seconds": "x"}, {"cell": 3}, {"schema": "1"}, {"schema": True}, {"status": None}):
            path.write_text(json.dumps({**good, **change}))
            with pytest.raises(CheckpointError):
                read_record(path)
        with pytest.raises(InputError, match="unknown to this fgai"):
            Cell.from_dict({**cell.to_dict(), "wings": 2})


class TestJson:
    @pytest.mark.parametrize(
        "text",
        [
            "[" * 100_000,
            "[" * 70 + "]" * 70,
            "NaN",
            "[1e999]",
            "1" * 400,
            '{"a": 1, "a": 1}',
            "",
            "{",
            "\x00",
        ],
    )
    def test_what_is_no_plain_document_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)

    def test_python_writes_numbers_that_are_none(self) -> None:
        assert parse_json("[-Infinity]", finite=False) == [-float("inf")]
