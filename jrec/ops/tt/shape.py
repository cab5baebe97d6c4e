"""Shapes of tensor-train tables: how rows and dim are factored into cores, and the ranks between the cores.

Row ``i`` of a table of ``d`` cores has one digit a core, ``i = (..(i_1 * m_2 + i_2) * m_3 + ..) + i_d``, and is the
product of the slices its digits choose (TT-Rec, Equation 3). Names of the papers' symbols here: ``m_k`` is
``row_factors[k]``, ``n_k`` is ``dim_factors[k]``, ``R_k`` is ``ranks[k]``, from ``R_1`` to ``R_(d-1)``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

MAX_ROWS = 2**31 - 1  # addresses are int32, and one value past the end marks padding
SEARCHED_CORES = (2, 3, 4)
DEFAULT_IMBALANCE = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTShape:
    """A tensor-train table of ``rows`` vectors of ``dim`` elements.

    Core ``k`` is an array of (m_k, R_(k-1), n_k, R_k), with ``R_0 = R_d = 1``: a slice, which is what a digit
    chooses, lies in one piece.

    Attributes:
      rows: How many rows the table has.
      dim: Elements of a row.
      row_factors: (m_1, .., m_d); their product is at least ``rows``, and rows past ``rows`` are never read.
      dim_factors: (n_1, .., n_d); their product is ``dim``.
      ranks: (R_1, .., R_(d-1)).

    Raises:
      ValueError: On factors that do not hold the table, or ranks above what any table of this shape needs.

    Example:
      >>> shape = TTShape(rows=10_131_227, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(32, 32))
      >>> shape.num_parameters
      495360
    """

    rows: int
    dim: int
    row_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("row_factors", "dim_factors", "ranks"):
            object.__setattr__(self, name, tuple(int(value) for value in getattr(self, name)))
        _check_size(self.rows, self.dim)
        cores = len(self.row_factors)
        if cores < 2:
            raise ValueError(f"row_factors {list(self.row_factors)} name {cores} cores; a tensor train has at least 2")
        if len(self.dim_factors) != cores or len(self.ranks) != cores - 1:
            raise ValueError(
                f"{cores} row_factors need {cores} dim_factors and {cores - 1} ranks, but there are"
                f" {len(self.dim_factors)} and {len(self.ranks)}"
            )
        for name in ("row_factors", "dim_factors", "ranks"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} {list(getattr(self, name))} must all be at least 1")
        if max(self.row_factors) > MAX_ROWS:
            raise ValueError(f"row_factors {list(self.row_factors)} must all be at most {MAX_ROWS}")
        if self.capacity < self.rows:
            raise ValueError(
                f"row_factors {list(self.row_factors)} hold {self.capacity:,} rows, but the table has {self.rows:,};"
                " enlarge a factor, or let TTShape.search choose them"
            )
        if math.prod(self.dim_factors) != self.dim:
            raise ValueError(
                f"dim_factors {list(self.dim_factors)} multiply to {math.prod(self.dim_factors)}, but the table's dim"
                f" is {self.dim}"
            )
        for bond, (rank, bound) in enumerate(zip(self.ranks, self.max_ranks, strict=True), start=1):
            if rank > bound:
                raise ValueError(
                    f"ranks[{bond - 1}] is {rank}, but {bound} already represents every table of row_factors"
                    f" {list(self.row_factors)} and dim_factors {list(self.dim_factors)}; give a rank a bond, at most"
                    f" {list(self.max_ranks)}"
                )

    @staticmethod
    def search(
        rows: int,
        dim: int,
        *,
        num_cores: int = 3,
        ranks: int | Sequence[int] = 32,
        imbalance: float = DEFAULT_IMBALANCE,
    ) -> TTShape:
        """The shape with the least padded rows, and among those the most balanced one.

        Args:
          rows: How many rows the table has.
          dim: Elements of a row.
          num_cores: 2, 3 or 4.
          ranks: One for all bonds, or one for each of the ``num_cores - 1``.
          imbalance: How many times the smallest row factor the greatest may be; at least 1. Factors ascend, so that
            the last core is the longest and rows share as many prefixes as may be.

        Returns:
          The shape.

        Raises:
          ValueError: On a count of cores that is not searched, or what ``TTShape`` refuses.

        Example:
          >>> TTShape.search(10_131_227, 16).row_factors
          (198, 208, 246)
        """
        _check_size(rows, dim)
        if num_cores not in SEARCHED_CORES:
            raise ValueError(f"num_cores is {num_cores}; shapes are searched for 2, 3 and 4. Give other shapes whole")
        if imbalance < 1:
            raise ValueError(f"imbalance is {imbalance}; it must be at least 1")
        return TTShape(
            rows=rows,
            dim=dim,
            row_factors=_row_factors(rows, num_cores, float(imbalance)),
            dim_factors=_dim_factors(dim, num_cores),
            ranks=(ranks,) * (num_cores - 1) if isinstance(ranks, int) else tuple(ranks),
        )

    @property
    def num_cores(self) -> int:
        """How many cores there are, ``d``."""
        return len(self.row_factors)

    @property
    def bonds(self) -> tuple[int, ...]:
        """(R_0, .., R_d): the ranks with the ones at both ends."""
        return (1, *self.ranks, 1)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(m_k, R_(k-1), n_k, R_k) of every core."""
        bonds = self.bonds
        return tuple(
            (m, bonds[k], n, bonds[k + 1])
            for k, (m, n) in enumerate(zip(self.row_factors, self.dim_factors, strict=True))
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def capacity(self) -> int:
        """Rows the factors could hold; those past ``rows`` are padding."""
        return math.prod(self.row_factors)

    @property
    def compression(self) -> float:
        """How many times more elements the uncompressed table has than the cores."""
        return self.rows * self.dim / self.num_parameters

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """Per bond the rank that represents every table, the smaller side of the unfolding there."""
        sizes = [m * n for m, n in zip(self.row_factors, self.dim_factors, strict=True)]
        return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))

    def with_ranks(self, ranks: int | Sequence[int]) -> TTShape:
        """The same factors with other ranks."""
        ranks = (ranks,) * (self.num_cores - 1) if isinstance(ranks, int) else tuple(ranks)
        return dataclasses.replace(self, ranks=ranks)

    def prefixes(self, cores: int) -> int:
        """How many products of the first ``cores`` cores there are."""
        return math.prod(self.row_factors[:cores])


def check_shape(shape: object) -> None:
    """Raises ValueError on what is no shape of a tensor-train table."""
    if not isinstance(shape, TTShape):
        raise ValueError(f"shape must be a jrec.TTShape, such as TTShape.search(rows, dim), but is {shape!r}")


def _check_size(rows: int, dim: int) -> None:
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"a table of {rows} rows is not possible; rows go from 1 to {MAX_ROWS:,}")
    if dim < 1:
        raise ValueError(f"dim is {dim}; it must be at least 1")


@functools.lru_cache(maxsize=1024)
def _row_factors(rows: int, cores: int, imbalance: float) -> tuple[int, ...]:
    """Ascending factors of least product, ties by least spread; none above ``imbalance`` times the least."""
    root = rows ** (1 / cores)
    # The least factor is at most the root and the greatest at least that. One more on each side absorbs rounding; with
    # factors one apart allowed, a solution always exists.
    low, high = max(1, int(root / imbalance) - 1), int(root * imbalance) + 2
    leading = np.meshgrid(
        np.arange(low, int(root) + 2, dtype=np.int64),
        *[np.arange(low, high + 1, dtype=np.int64) for _ in range(cores - 2)],
        indexing="ij",
        sparse=True,
    )
    product = functools.reduce(np.multiply, leading)
    last = -(-rows // product)
    ascending = last >= leading[-1]
    for smaller, greater in itertools.pairwise(leading):
        ascending = ascending & (smaller <= greater)
    first = leading[0]
    balanced = last <= np.maximum((first * imbalance).astype(np.int64), first + 1)
    capacity = product * last
    spread = last - first
    allowed = ascending & balanced
    least = capacity[allowed].min()
    chosen = np.where(allowed & (capacity == least), spread, np.iinfo(np.int64).max)
    place = np.unravel_index(int(np.argmin(chosen)), chosen.shape)
    factors = [int(axis.reshape(-1)[i]) for axis, i in zip(leading, place, strict=True)]
    return (*factors, int(last[place]))


@functools.lru_cache(maxsize=1024)
def _dim_factors(dim: int, cores: int) -> tuple[int, ...]:
    """Ascending factors of exactly ``dim``, the greatest as small as may be, then the sum."""
    divisors = [n for n in range(1, dim + 1) if dim % n == 0]
    candidates = [
        (*leading, dim // math.prod(leading))
        for leading in itertools.combinations_with_replacement(divisors, cores - 1)
        if dim % math.prod(leading) == 0 and dim // math.prod(leading) >= leading[-1]
    ]
    return min(candidates, key=lambda factors: (factors[-1], sum(factors)))
