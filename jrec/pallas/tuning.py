"""Tuning configs of the kernels: pure functions of shapes, dtypes and GPU.

``MEASURED`` holds entries with their evidence and wins over the heuristic; it is empty until kernels have run on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jrec.pallas.tile import Tile

H200 = "NVIDIA H200"
MULTIPROCESSORS: Mapping[str, int] = {H200: 132, "NVIDIA H100 80GB HBM3": 132}

_REGISTER_BUDGET = (
    96  # of 255 a thread may have: leaves addresses and scalars room, and two blocks on a multiprocessor's file
)
_IN_FLIGHT = 4  # 16-byte loads per thread before the first use, which cover the memory's latency at 16 warps and more


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How a gather-reduce kernel is laid out.

    Attributes:
      chunks: rows that each thread takes part in at once.
      unroll: lookups of each segment whose rows are loaded before the first is added; a power of two.
      split: runs of this many lookups that lie within one segment are summed apart, by blocks of their own; a power of
        two. So no thread sums more than twice as many lookups.
      blocks: the most thread blocks launched; each walks over tiles in strides of that. Bounds the cost of padding.
      prefetch: whether a fused update loads the table's row and slots before it sums the gradient.
    """

    chunks: int
    unroll: int
    split: int = 64
    blocks: int = 2**20
    prefetch: bool = True

    def __post_init__(self) -> None:
        for name in ("unroll", "split"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        if self.split < 2:
            raise ValueError(f"{self.split=} must be at least 2: levels of pieces would never shrink")
        if self.chunks < 1 or self.blocks < 1:
            raise ValueError(f"{self.chunks=} and {self.blocks=} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A config that won on a GPU, and the evidence for it."""

    config: TuningConfig
    evidence: str


# (GPU, dim, itemsize, fused) -> what was measured best.
MEASURED: Mapping[tuple[str, int, int, bool], Measurement] = {}


def tune(
    *, dim: int, itemsize: int, segments: int, lookups: int, element_slots: int | None = None, gpu: str = H200
) -> TuningConfig:
    """The config for a gather-reduce, or with ``element_slots`` for one fused with an update.

    Args:
      dim: elements of a row.
      itemsize: bytes of an element of the table (or source).
      segments: how many segments there are.
      lookups: how many indices there are, padding included.
      element_slots: (rows, dim) slots of the optimizer of a fused update, or None without one.
      gpu: the device's name as JAX gives it.
    """
    fused = element_slots is not None
    if (measured := MEASURED.get((gpu, dim, itemsize, fused))) is not None:
        return measured.config
    tile = Tile.of(dim, itemsize)
    live = 1 + (1 + element_slots if element_slots is not None else 0)  # tiles alive beside the loads in flight
    mean = max(1, lookups // max(1, segments))
    unroll = 1
    while unroll < min(mean, _IN_FLIGHT) and (live + 2 * unroll) * tile.registers <= _REGISTER_BUDGET:
        unroll *= 2
    chunks = 1
    while (
        tile.blocks * unroll * chunks < _IN_FLIGHT and 2 * chunks * (live + unroll) * tile.registers <= _REGISTER_BUDGET
    ):
        chunks *= 2
    return TuningConfig(
        chunks=chunks,
        unroll=unroll,
        blocks=16 * MULTIPROCESSORS.get(gpu, 132) if fused else 2**20,
        prefetch=(live + unroll) * chunks * tile.registers <= _REGISTER_BUDGET,
    )
