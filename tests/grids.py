"""Grids of which the default run takes the cases that no other stands for, and ``-m slow`` the others."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def some_of(cases: Iterable[Any], *default: Any) -> list[Any]:
    """All cases for ``parametrize``, a tuple each where it names several arguments; slow but for the default ones."""
    cases = list(cases)
    _all_among(default, cases)
    return [case if case in default else _slow(case) for case in cases]


def in_turn(*axes: Sequence[Any]) -> list[tuple]:
    """Of a grid as many cases as its longest axis has values, each value of each axis in one or more of them."""
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


def _all_among(default: Collection[Any], cases: Collection[Any]) -> None:
    if missing := [case for case in default if case not in cases]:
        raise ValueError(f"{missing} are no cases")
