"""One level of a tensor-train table with random entries, and what its kernels must give, in plain NumPy and float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelCase:
    """Entries ``below[parents] @ core[digits]``, of which the last ones are padding, and bags that look them up.

    Attributes:
      below: (P, A, R).
      core: (m, R, n, R').
      parents: (capacity,) int32 ascending; padding holds P.
      digits: (capacity,) int32; padding holds m.
      real: how many entries are none.
      gradient: (capacity, A * n, R') float32, NaN at padding.
      sources: (lookups,) int32 entries, -1 for padding, ``capacity`` for one past the table.
      offsets: (bags + 1,) int32.
      weights: (lookups,) float32.
    """

    below: np.ndarray
    core: np.ndarray
    parents: np.ndarray
    digits: np.ndarray
    real: int
    gradient: np.ndarray
    sources: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray

    @property
    def order(self) -> np.ndarray:
        """Entries by digit, padding last."""
        return np.argsort(self.digits, kind="stable").astype(np.int32)

    def products(self) -> np.ndarray:
        """(real, A * n, R') float64."""
        below, core = self.below.astype(np.float64), self.core.astype(np.float64)
        left, right = below[self.parents[: self.real]], core[self.digits[: self.real]]
        return np.einsum("uar,urns->uans", left, right).reshape(
            self.real, below.shape[1] * core.shape[2], core.shape[3]
        )

    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        """Of ``below`` and ``core``, float64."""
        below, core = self.below.astype(np.float64), self.core.astype(np.float64)
        of_below, of_core = np.zeros(below.shape), np.zeros(core.shape)
        for u in range(self.real):
            p, d = self.parents[u], self.digits[u]
            slope = self.gradient[u].astype(np.float64).reshape(below.shape[1], core.shape[2], core.shape[3])
            of_below[p] += np.einsum("ans,rns->ar", slope, core[d])
            of_core[d] += np.einsum("ar,ans->rns", below[p], slope)
        return of_below, of_core

    def bags(self) -> np.ndarray:
        """(bags, A * n) float64, for a core whose right rank is 1."""
        rows = self.products()[:, :, 0]
        out = np.zeros((len(self.offsets) - 1, rows.shape[1]))
        for bag in range(len(out)):
            for j in range(self.offsets[bag], self.offsets[bag + 1]):
                if self.sources[j] >= self.real:
                    out[bag] = np.nan
                elif self.sources[j] >= 0:
                    out[bag] += float(self.weights[j]) * rows[self.sources[j]]
        return out


def make_level(
    rng: np.random.Generator,
    *,
    height: int,
    rank: int,
    columns: int,
    right_rank: int = 1,
    parents: int = 5,
    slices: int = 6,
    capacity: int = 20,
    real: int | None = None,
    bags: int = 7,
    lookups: int = 24,
    dtype: str = "float32",
    past: bool = False,
) -> LevelCase:
    """A random level: unique (parent, digit) pairs in ascending order, as ``tt_index`` makes them."""
    real = min(parents * slices, capacity - 2 if real is None else real)
    pairs = np.sort(rng.choice(parents * slices, real, replace=False))
    of_parent, of_digit = np.full(capacity, parents, np.int32), np.full(capacity, slices, np.int32)
    of_parent[:real], of_digit[:real] = pairs // slices, pairs % slices
    gradient = np.full((capacity, height * columns, right_rank), np.nan, np.float32)
    gradient[:real] = rng.normal(size=(real, height * columns, right_rank))
    offsets = np.sort(rng.integers(0, lookups + 1, bags + 1)).astype(np.int32)
    offsets[0] = 0
    sources = rng.integers(-1, max(real, 1) if real else 0, lookups).astype(np.int32)
    if past and lookups:
        sources[rng.integers(lookups)] = capacity
    stored = jnp.dtype(dtype)
    return LevelCase(
        below=rng.normal(size=(parents, height, rank)).astype(stored),
        core=rng.normal(size=(slices, rank, columns, right_rank)).astype(stored),
        parents=of_parent,
        digits=of_digit,
        real=real,
        gradient=gradient,
        sources=sources,
        offsets=offsets,
        weights=rng.normal(size=lookups).astype(np.float32),
    )
