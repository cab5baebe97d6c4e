"""One program of the check, its inputs, and the judgement of its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from jrec.ops.dispatch import Implementation


class Wrong(Exception):  # noqa: N818, it is a judgement, not an error
    """A result that is not what it must be; the message says where."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """One set of inputs.

    Attributes:
      name: A name for messages.
      arguments: Pytrees of NumPy arrays.
      judge: Takes the outputs and how many times the tolerance is allowed; returns the largest error as a fraction of
        the tolerance, or raises ``Wrong``.
    """

    name: str
    arguments: tuple[Any, ...]
    judge: Callable[[Any, float], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function that is compiled once and run on several draws.

    Attributes:
      name: A name for messages.
      build: Makes the function of a draw's arguments, from a module of kernels and the implementation's name.
      draws: The inputs, all of the same shapes.
      donated: Which arguments are given up, so that the outputs take their memory.
      agreement: The least share of elements whose bits must equal XLA's.
      xla_slack: How many times the tolerance XLA's result may be off.
    """

    name: str
    build: Callable[[ModuleType, Implementation], Callable[..., Any]]
    draws: tuple[Draw, ...]
    donated: tuple[int, ...] = ()
    agreement: float = 0.0
    xla_slack: float = 1.0


def worst(name: str, got: Any, want: np.ndarray, off: np.ndarray) -> float:
    """The largest error as a fraction of what is allowed.

    Args:
      name: The array's name.
      got: What was computed.
      want: float64 of the same shape.
      off: What each element may be off by; where it is 0, nothing else than ``want`` is right.

    Raises:
      Wrong: If an element is off by more, or shapes or NaN differ.
    """
    got = np.asarray(got).astype(np.float64)
    if got.shape != want.shape:
        raise Wrong(f"{name} has shape {got.shape}, not {want.shape}")
    if not want.size:
        return 0.0
    expected_nan = np.isnan(want)
    error = np.where(expected_nan | np.isnan(got), 0.0, np.abs(got - np.where(expected_nan, 0.0, want)))
    share = np.where(error == 0, 0.0, error / np.maximum(off, 1e-300))
    share = np.where(expected_nan != np.isnan(got), np.inf, share)
    place = np.unravel_index(np.argmax(share), share.shape)
    if share[place] > 1:
        at = [int(i) for i in place]
        raise Wrong(f"{name}{at} is {got[place]:.9g}, not {want[place]:.9g} within {float(off[place]):.2g}")
    return float(share[place])
