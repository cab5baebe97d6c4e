"""Skewed inputs for the check: lookups as click logs have them, and the corners that kernels trip over."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = ("power law", "one row", "half padding", "past the end", "all padding")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupSizes:
    """Sizes that one program is compiled for.

    Attributes:
      name: A name for messages.
      rows: Rows of the table.
      bags: How many bags there are.
      length: Ids a bag, of padded bags; None of ragged ones.
      capacity: Room for ids, of ragged bags.
      weighted: Whether lookups have weights.
      hot: Whether nearly all ids are in one ragged bag; others are of any length, some of none.
    """

    name: str
    rows: int
    bags: int
    length: int | None = None
    capacity: int = 0
    weighted: bool = False
    hot: bool = False

    @property
    def lookups(self) -> int:
        """Room for ids."""
        return self.capacity if self.length is None else self.bags * self.length


# The hot case's largest segment is split in pieces twice over (see docs/kernels.md, Skew).
SIZES = (
    LookupSizes(name="padded", rows=300, bags=300, length=7),
    LookupSizes(name="ragged", rows=500, bags=70, capacity=2000, weighted=True),
    LookupSizes(name="hot", rows=400, bags=5, capacity=20_000, hot=True),
)
TINY_SIZES = (
    LookupSizes(name="padded", rows=9, bags=10, length=3),
    LookupSizes(name="ragged", rows=17, bags=6, capacity=160, weighted=True, hot=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookups:
    """Bags of ids.

    Attributes:
      ids: int32, (bags, length) or (capacity,).
      offsets: (bags + 1,) int32 of ragged bags.
      weights: float32 of the shape of ``ids``, or None.
    """

    ids: np.ndarray
    offsets: np.ndarray | None
    weights: np.ndarray | None


def draw_lookups(rng: np.random.Generator, sizes: LookupSizes, kind: str) -> Lookups:
    """Random lookups of a form.

    Args:
      rng: The source of randomness.
      sizes: The sizes.
      kind: How ids are distributed, one of ``KINDS``.
    """
    size = sizes.lookups
    ids = hashed_power_law(rng, sizes.rows, size)
    if kind == "one row":
        ids[:] = rng.integers(sizes.rows)
    elif kind == "half padding":
        ids[rng.random(size) < 0.5] = -1
    elif kind == "past the end":
        ids[rng.random(size) < 0.05] = rng.integers(sizes.rows, sizes.rows + 5)
    elif kind == "all padding":
        ids[:] = rng.integers(-3, 0, size)
    weights = rng.normal(size=size).astype(np.float32) if sizes.weighted else None
    if sizes.length is not None:
        shape = sizes.bags, sizes.length
        return Lookups(
            ids=ids.reshape(shape), offsets=None, weights=None if weights is None else weights.reshape(shape)
        )
    cuts = np.sort(rng.integers(0, size + 1, sizes.bags + 1))
    if sizes.hot:
        cuts[2:] = size - np.arange(sizes.bags - 1)[::-1] * (size // (40 * sizes.bags))
        cuts[1] = cuts[2] // 30
    cuts[0], cuts[-1] = 0, size if sizes.hot else min(cuts[-1], size - 3)  # a tail of nobody's ids
    cuts[-2] = cuts[-1]  # and an empty bag, the last
    return Lookups(ids=ids, offsets=np.minimum(cuts, cuts[-1]).astype(np.int32), weights=weights)


def hashed_power_law(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Ids by a power law of exponent 1, (size,) int32; frequent ones lie anywhere in the table, as hashed ids do."""
    rank = np.minimum(np.exp(rng.random(size) * np.log(rows + 1)) - 1, rows - 1).astype(np.int64)
    return (rank * 2654435761 % (1 << 32) % rows).astype(np.int32)


def draw_table(rng: np.random.Generator, rows: int, dim: int, dtype: str) -> np.ndarray:
    """(rows, dim) normal numbers of a dtype."""
    return rng.normal(size=(rows, dim)).astype(DTYPES[dtype])
