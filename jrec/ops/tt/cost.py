"""Which contraction is the quickest: a pure function of shapes, expected reuse and platform, which can be asked why.

A batch's unique rows are not known when its program is compiled, so the choice rests on a ``TTTraffic``: counted from a
sample of ids, or expected of a power law over rows in frequency order, as ``jrec prepare`` numbers them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from jrec.ops.tt.shape import TTShape

Contraction = Literal["naive", "unique", "dense", "sample"]
CONTRACTIONS: tuple[str, ...] = get_args(Contraction)
Platform = Literal["cpu", "gpu"]
ZIPF_EXPONENT = 1.05  # of the published click logs' largest tables, about


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTraffic:
    """What one batch asks of a table.

    Attributes:
      lookups: Ids in a batch.
      entries: Unique products of the first two cores, of the first three, .., and unique rows.
      pairs: Unique (bag, longest prefix); as many as lookups where bags have one id.
    """

    lookups: int
    entries: tuple[int, ...]
    pairs: int

    @staticmethod
    def expected(
        shape: TTShape, lookups: int, *, bags: int | None = None, exponent: float = ZIPF_EXPONENT
    ) -> TTTraffic:
        """What to expect of ids that follow a power law over row numbers, in ``bags`` of equal lengths or in one each.

        Example:
          >>> shape = TTShape.search(10_131_227, 16)
          >>> [round(n, -3) for n in TTTraffic.expected(shape, 32768).entries]
          [5000, 14000]
        """
        suffixes = [math.prod(shape.row_factors[k:]) for k in range(2, shape.num_cores)] + [1]
        entries = tuple(min(lookups, round(_unique(shape.rows, suffix, lookups, exponent))) for suffix in suffixes)
        pairs = lookups
        if bags is not None and 0 < bags < lookups:
            pairs = min(lookups, round(bags * _unique(shape.rows, shape.row_factors[-1], lookups / bags, exponent)))
        return TTTraffic(lookups=lookups, entries=entries, pairs=pairs)

    @staticmethod
    def of(shape: TTShape, ids: ArrayLike, offsets: ArrayLike | None = None) -> TTTraffic:
        """Counted from a batch on the host: (num_bags, length) ids, or (capacity,) ids with (num_bags + 1,) offsets."""
        flat = np.asarray(ids, np.int64)
        if offsets is None:
            bags = np.repeat(np.arange(flat.shape[0]), flat.shape[1])
        else:
            bounds = np.asarray(offsets, np.int64)
            bags, flat = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), flat[: bounds[-1]]
        flat = flat.reshape(-1)
        bags, flat = bags[flat >= 0], flat[flat >= 0]
        prefixes, entries = np.unique(flat), []
        for factor in reversed(shape.row_factors[1:]):
            entries.append(len(prefixes))
            prefixes = np.unique(prefixes // factor)
        pairs = np.unique(np.stack([bags, flat // shape.row_factors[-1]]), axis=1).shape[1] if flat.size else 0
        return TTTraffic(lookups=len(flat), entries=tuple(reversed(entries)), pairs=pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of a platform. Only their ratios matter to a choice.

    Attributes:
      name: What ``explain`` calls it.
      gemm: Multiply-adds a second of one large GEMM.
      grouped: Multiply-adds a second of small products, one an entry.
      gathered: Bytes a second of the entries' operands and results; the cores themselves stay in the caches.
      written: Bytes a second of the dense product.
      scattered: Bytes a second of gradients that are added where indices repeat.
    """

    name: str
    gemm: float
    grouped: float
    gathered: float
    written: float
    scattered: float


# Of two cores of an AMD EPYC (Zen 3), fitted to the contractions' times at 4,096 and 32,768 lookups of the largest
# Kaggle table; the GPU's are from an H200's published figures and await their measurement.
MACHINES: dict[tuple[str, bool], Machine] = {
    ("cpu", True): Machine(
        name="CPU, native kernels", gemm=3e10, grouped=1.5e10, gathered=3e10, written=2.2e9, scattered=3e10
    ),
    ("cpu", False): Machine(name="CPU, XLA", gemm=3e10, grouped=1.5e9, gathered=3e9, written=2.2e9, scattered=6e8),
    ("gpu", False): Machine(name="H200, XLA", gemm=1e14, grouped=2e12, gathered=4e12, written=3e12, scattered=1e12),
}
_DENSE_BACKWARD_PASSES = 6  # over the dense gradient: zeros, scatter, and for each of two GEMMs a transpose and a read


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTChoice:
    """The contraction of the forward and of the backward pass, and why.

    Attributes:
      forward: The quickest forward pass.
      backward: "unique" or "dense".
      forward_seconds: Estimate of every forward pass that is possible.
      backward_seconds: Estimate of every backward pass.
      traffic: What was assumed of a batch.
      machine: The machine whose rates were used.
    """

    forward: Contraction
    backward: Contraction
    forward_seconds: Mapping[str, float]
    backward_seconds: Mapping[str, float]
    traffic: TTTraffic
    machine: Machine

    def __str__(self) -> str:
        def line(which: str, chosen: str, seconds: Mapping[str, float]) -> str:
            ranked = sorted(seconds.items(), key=lambda item: item[1])
            costs = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in ranked)
            return f"{which}: {chosen} ({costs})"

        counts = " and ".join(f"{n:,} {kind}" for n, kind in _named_entries(self.traffic))
        return "\n".join(
            (
                f"{self.traffic.lookups:,} lookups with {counts}, on {self.machine.name}",
                line("forward", self.forward, self.forward_seconds),
                line("backward", self.backward, self.backward_seconds),
            )
        )


def explain(
    shape: TTShape,
    lookups: int,
    *,
    bags: int | None = None,
    platform: Platform = "cpu",
    native: bool | None = None,
    traffic: TTTraffic | None = None,
) -> TTChoice:
    """Which contraction ``tt_embedding_bag`` and ``tt_lookup`` take by default, and why; print it.

    Args:
      shape: The table's shape.
      lookups: Ids a batch has room for.
      bags: How many bags they are in; None for one each.
      platform: "cpu" or "gpu".
      native: Whether the native CPU kernels run; None for "on a CPU".
      traffic: What a batch asks of the table; None for ``TTTraffic.expected``.

    Raises:
      ValueError: On a platform that is not known.

    Example:
      >>> shape = TTShape.search(10_131_227, 16)
      >>> explain(shape, 32768, platform="gpu").backward
      'dense'
    """
    if platform not in ("cpu", "gpu"):
        raise ValueError(f"platform {platform!r} is unknown; choose cpu or gpu")
    return _choose(shape, lookups, bags, platform, platform == "cpu" if native is None else native, traffic)


@functools.lru_cache(maxsize=4096)
def _choose(
    shape: TTShape, lookups: int, bags: int | None, platform: str, native: bool, traffic: TTTraffic | None
) -> TTChoice:
    traffic = TTTraffic.expected(shape, lookups, bags=bags) if traffic is None else traffic
    machine = MACHINES[platform, native and platform == "cpu"]
    forward, backward = contraction_seconds(shape, traffic, machine)
    return TTChoice(
        forward=min(forward, key=lambda name: forward[name]),  # type: ignore[arg-type]
        backward=min(backward, key=lambda name: backward[name]),  # type: ignore[arg-type]
        forward_seconds=forward,
        backward_seconds=backward,
        traffic=traffic,
        machine=machine,
    )


def contraction_seconds(
    shape: TTShape, traffic: TTTraffic, machine: Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimated seconds of the products of every contraction, forward and backward."""
    levels = _levels(shape)

    def forward(count: float, level: _LevelCost) -> float:
        return count * (level.products / machine.grouped + level.moved / machine.gathered)

    def backward(count: float, level: _LevelCost) -> float:
        moved = 2 * level.moved / machine.gathered + (level.slice + level.below) / machine.scattered
        return count * (2 * level.products / machine.grouped + moved)

    ways = {"unique": list(zip(traffic.entries, levels, strict=True))}
    ways["naive"] = [(traffic.lookups, level) for level in levels]
    ways["sample"] = [*ways["unique"][:-1], (traffic.pairs, levels[-1])]
    forwards = {name: sum(forward(*step) for step in steps) for name, steps in ways.items()}
    # Pairs are not known when the program is compiled: the sums of slices have room for a pair a lookup, all of it
    # written. Measured on two CPU cores, "sample" takes 1.0 to 15 times as long as "unique" even where each bag's rows
    # have one prefix of their own, because of this.
    slices = traffic.lookups * levels[-1].slice
    forwards["sample"] += slices / machine.gathered + slices / machine.written + slices / machine.scattered
    # A backward pass takes two products an entry, of the slice's gradient and of the prefix's.
    backwards = {"unique": sum(backward(*step) for step in ways["unique"])}
    if shape.num_cores > 2 and dense_fits(shape):
        whole, entries = shape.prefixes(2), traffic.entries[0]
        gemm, written = whole * levels[0].products / machine.gemm, whole * levels[0].out / machine.written
        taken = entries * levels[0].out / machine.gathered
        upper = ways["unique"][1:]
        forwards["dense"] = gemm + written + taken + sum(forward(*step) for step in upper)
        backwards["dense"] = (
            2 * gemm + _DENSE_BACKWARD_PASSES * written + taken + sum(backward(*step) for step in upper)
        )
    return forwards, backwards


def fuses_pooling(shape: TTShape, lookups: int, traffic: TTTraffic | None = None) -> bool:
    """Whether the Pallas kernels multiply the last slices anew for every lookup, inside the pooling.

    That saves writing each unique row and reading it again; where lookups far outnumber unique rows it costs more than
    it saves. Rests on the GPU's published rates: no measurement stands behind it yet.
    """
    traffic = TTTraffic.expected(shape, lookups) if traffic is None else traffic
    machine, level = MACHINES["gpu", False], _levels(shape)[-1]
    product = level.products / machine.grouped + (level.slice + level.below) / machine.gathered
    row = level.out / machine.gathered
    return traffic.lookups * product <= traffic.entries[-1] * (product + row) + traffic.lookups * row


def dense_fits(shape: TTShape) -> bool:
    """Whether int32 can number the rows of the dense product of the first two cores."""
    return shape.prefixes(2) * shape.dim_factors[0] < 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LevelCost:
    """What one entry of a level costs: multiply-adds, and bytes of its slice, of the product below and of its own."""

    products: int
    slice: int
    below: int
    out: int

    @property
    def moved(self) -> int:
        return self.slice + self.below + self.out


def _levels(shape: TTShape) -> list[_LevelCost]:
    costs, rows = [], shape.dim_factors[0]
    for _, left, n, right in shape.core_shapes[1:]:
        costs.append(
            _LevelCost(
                products=rows * left * n * right,
                slice=4 * left * n * right,
                below=4 * rows * left,
                out=4 * rows * n * right,
            )
        )
        rows *= n
    return costs


def _named_entries(traffic: TTTraffic) -> list[tuple[int, str]]:
    names = [f"unique products of {k} cores" for k in range(2, len(traffic.entries) + 1)] + ["unique rows"]
    return list(zip(traffic.entries, names, strict=True))


def _unique(rows: int, suffix: int, lookups: float, exponent: float) -> float:
    """How many groups of ``suffix`` neighbouring rows power-law ids touch, on average."""
    groups = -(-rows // suffix)
    edges = np.unique(np.minimum(np.rint(np.geomspace(1, groups + 1, 4096)).astype(np.int64) - 1, groups))
    edges = np.unique(np.concatenate([edges, [groups]]))
    # The power law's integral over each range of groups, from half a row before its first: rows are in frequency order.
    reached = np.minimum(edges * float(suffix), rows) + 0.5
    mass = np.log(reached) if exponent == 1 else reached ** (1 - exponent) / (1 - exponent)
    share = np.diff(mass) / (mass[-1] - mass[0])
    width = np.diff(edges)
    missed = lookups * np.log1p(-np.minimum(share / width, 1 - 1e-12))  # by all lookups, the logarithm of its odds
    return float(np.sum(width * -np.expm1(missed)))
