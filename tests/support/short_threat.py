"""Imported by tests: gives the default threat two steps, which is enough wherever strength is not tested."""

from __future__ import annotations

from dataclasses import replace

from fgai.attacks import DEFAULT, THREATS

THREATS[DEFAULT] = replace(THREATS[DEFAULT], budget=replace(THREATS[DEFAULT].budget, steps=2))
