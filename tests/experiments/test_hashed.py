"""Random numbers by hashing: what is asked of any stream, and of one whose seed lies on the device."""

from __future__ import annotations

import torch
from scipy import stats

from experiments.algorithm1 import Hashed


def stream(seed: int = 1) -> Hashed:
    return Hashed(torch.tensor(seed))


def word(seed: int, place: int) -> int:
    """Number `place` of the stream in Python's whole numbers, before it is made a fraction."""

    def mixed(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    return mixed((mixed(seed) + place * 0x9E3779B97F4A7C15) % 2**64)


def test_numbers_are_those_of_the_reference() -> None:
    for seed in (0, 1, 2**62 + 12345):
        found = stream(seed).rand(5).tolist()
        assert found == [(word(seed, place) >> 11) / 2**53 for place in range(1, 6)]


def test_the_stream_goes_on_and_depends_on_the_seed_alone() -> None:
    one, two = stream(7), stream(7)
    torch.manual_seed(3)
    pieces = torch.cat([one.rand(3), one.rand(4)])
    torch.manual_seed(4)
    assert torch.equal(pieces, two.rand(7))
    assert not torch.equal(pieces, stream(8).rand(7))
    assert stream().rand(0).shape == (0,)


def test_a_seed_that_changes_in_place_changes_the_numbers() -> None:
    seed = torch.tensor(1)
    before = Hashed(seed).rand(4)
    seed.fill_(2)
    assert torch.equal(Hashed(seed).rand(4), stream(2).rand(4)) and not torch.equal(before, stream(2).rand(4))


def test_uniform_and_apart_for_neighbouring_seeds() -> None:
    drawn = stream(11).rand(100_000)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1 and drawn.dtype == torch.float64
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-3
    other = stream(12).rand(100_000)
    for pair in ((drawn, other), (drawn[1:], drawn[:-1])):
        assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.015
