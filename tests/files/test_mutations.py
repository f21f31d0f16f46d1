"""Every kind of file, damaged in every way: it is read as before or refused in words.

Files without a checksum (CSV and other text, pickles, grids, cells) may also be read for what they say now,
and so may JSON whose checksum was made anew.
"""

from __future__ import annotations

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fgai.errors import FgaiError
from fgai.files import add_checksum
from support.file_cases import KINDS

FEW, MANY = 300, 5000
PIECES = [b"-", b"9", b"99999999", b"nan", b"\n", b"../", b"["]
HOSTILE: list[Any] = [
    None, True, -1, 0, 1.5, 10**9, 2**63, 10**30, 1e308, "", "x", "../../x", "\0", "<b>", [], [[]], {},
    [None],
    {"kind": "evaluation"}, {"dtype": "<f8", "shape": [10**9], "data": "eJw="}, [1, 2, 3], {"a": {"b": [1]}},
]  # fmt: skip


@cache
def good(name: str) -> tuple[Path, list[str]]:
    """A folder with good files of a kind, and which of them may be damaged."""
    folder = Path(mkdtemp(prefix=f"fgai-{name}-"))
    return folder, [str(path.relative_to(folder)) for path in KINDS[name].write(folder)]


def damaged_bytes(raw: bytes, chance: Random) -> bytes:
    """Some bytes changed, cut out, put in, doubled or cut off."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(raw) + 1)
        stop = start + chance.randint(1, 40)
        new = chance.choice([chance.randbytes(chance.randint(1, 12)), *PIECES])
        raw = {
            "change": raw[:start] + new + raw[start + len(new) :],
            "cut": raw[:start] + raw[stop:],
            "put": raw[:start] + new + raw[start:],
            "double": raw[:stop] + raw[start:],
            "end": raw[:start],
        }[chance.choice(["change", "change", "cut", "put", "double", "end"])]
    return raw


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where nested values can be changed."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, item in inside for spot in spots(item, (*path, key)))]


def damaged_text(text: str, chance: Random) -> str:
    """One value replaced, taken out, joined by an unknown one, or sunk many levels deep."""
    values = json.loads(text)
    *way, last = chance.choice(spots(values)[1:])
    place = values
    for key in way:
        place = place[key]
    match chance.choice(["replace", "replace", "remove", "add", "sink"]):
        case "replace":
            place[last] = chance.choice(HOSTILE)
        case "remove":
            del place[last]
        case "add" if isinstance(place, dict):
            place["of a newer version"] = chance.choice(HOSTILE)
        case _:
            depth, place[last] = chance.choice([70, 3000, 200_000]), "sunk here"
            return json.dumps(values).replace('"sunk here"', "[" * depth + "]" * depth)
    return json.dumps(values)


@cache
def content(name: str) -> Any:
    """What the good files of a kind hold, where a checksum keeps it."""
    kind = KINDS[name]
    return None if kind.content is None else kind.content(kind.read(good(name)[0]))


def sealed(text: str) -> str:
    """JSON with a checksum that fits it, as somebody who means harm would write it."""
    values = json.loads(text)
    values.pop("checksum", None)
    return json.dumps(add_checksum(values))


def damage(name: str, seed: int) -> None:
    """Damage one file of a kind and read it: nothing but fgai's own errors may come out."""
    folder, files = good(name)
    kind, wanted, chance = KINDS[name], content(name), Random(f"{name} {seed}")
    file = chance.choice(files)
    raw, anew = (folder / file).read_bytes(), False
    if file.endswith(".json") and chance.random() < 0.7:
        text, has = damaged_text(raw.decode(), chance), b'"checksum"' in raw
        anew = has and "[" * 65 not in text and chance.random() < 0.5
        raw = (sealed(text) if anew else text).encode()
    else:
        raw = damaged_bytes(raw, chance)
    with TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(folder, copy)
        (copy / file).write_bytes(raw)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged edges may come twice
                found = kind.read(copy)
        except FgaiError as error:
            assert str(error)
        else:
            assert anew or kind.content is None or kind.content(found) == wanted, (
                f"{file} was changed silently"
            )


@pytest.mark.many
@pytest.mark.parametrize("name", sorted(KINDS))
def test_good_files_are_read(name: str, tmp_path: Path) -> None:
    assert KINDS[name].write(tmp_path) and KINDS[name].read(tmp_path) is not None


SEEDS = st.integers(0, 2**32)
QUICK: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.many
@pytest.mark.parametrize("name", sorted(KINDS))
@given(seed=SEEDS)
@settings(max_examples=FEW // len(KINDS), derandomize=True, **QUICK)
def test_damaged_files_are_read_as_they_are_or_refused(name: str, seed: int) -> None:
    damage(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS))
@given(seed=SEEDS)
@settings(max_examples=-(-MANY // len(KINDS)), **QUICK)
def test_many_damaged_files_are_read_as_they_are_or_refused(name: str, seed: int) -> None:
    damage(name, seed)
