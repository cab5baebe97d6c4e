"""Tuning configs of the kernels: pure functions of shapes, dtypes and GPU.

Entries of ``measured.json`` win over the heuristic; there are none until a sweep (``benchmarks.gpu_tune``) has run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jrec.pallas import measured
from jrec.pallas.tile import Tile

H200 = "NVIDIA H200"
MULTIPROCESSORS: Mapping[str, int] = {H200: 132, "NVIDIA H100 80GB HBM3": 132}

_SHORT_REGISTERS = 64  # for rows: with addresses and scalars about 80 of 255, which lets 24 warps on a multiprocessor
_IN_FLIGHT = 4  # 16-byte loads per thread before the first use, which cover the memory's latency at 16 warps and more
_SKEWED_UNROLL = 8  # most segments of hashed ids end in one step of it; a step that is not filled loads nothing
_TOP = 512  # some 64 steps, beside the short segments, for the one that owns every lookup; none for others
_LOOKS = 4  # runs that one thread looks at for long segments; 16 cost 47 registers where 4 threads share a row
_DIRECT = 1024  # lookups of a padded segment that one thread adds up, where there are segments enough for all threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How a gather-reduce kernel is laid out.

    Attributes:
      chunks: Rows that each thread takes part in at once.
      unroll: Lookups of each segment whose rows are loaded before the first is added; a power of two.
      long_unroll: The same for segments that are summed from pieces; a power of two.
      split: Runs of this many lookups that lie within one segment are summed apart, by blocks of their own; a power of
        two. So no thread sums more than twice as many lookups.
      top: Pieces that the highest level may have: what a segment that owns every lookup walks over at the end, against
        another launch.
      blocks: The most thread blocks launched; each walks over tiles in strides of that. Bounds the cost of padding, and
        lets a block load the next tile's lookups while it sums this one's.
      prefetch: Whether a fused update loads the table's row and slots before it sums the gradient.
    """

    chunks: int
    unroll: int
    long_unroll: int = 4
    split: int = 32
    top: int = 512
    blocks: int = 2**20
    prefetch: bool = True

    def __post_init__(self) -> None:
        for name in ("unroll", "long_unroll", "split"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        if self.split < 2:
            raise ValueError(f"{self.split=} must be at least 2: levels of pieces would never shrink")
        if min(self.chunks, self.top, self.blocks) < 1:
            raise ValueError(f"{self.chunks=}, {self.top=} and {self.blocks=} must be at least 1")


@functools.cache
def device_kind() -> str:
    """The name of the first GPU that JAX uses, or the H200's where it uses none: programs are then compiled for one."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else H200


def tune(
    *,
    dim: int,
    itemsize: int,
    length: int | None,
    element_slots: int | None = None,
    gpu: str | None = None,
) -> TuningConfig:
    """The config for a gather-reduce, or with ``element_slots`` for one fused with an update.

    Args:
      dim: Elements of a row.
      itemsize: Bytes of an element of the table (or source).
      length: Lookups of every segment where they are as many, else None: then a few segments own most lookups, and
        most segments have one or two, as in the cast of a click log.
      element_slots: Slots of shape (rows, dim) of a fused update's optimizer, or None without an update.
      gpu: The device's name as JAX gives it, or None for the local one's.
    """
    gpu = device_kind() if gpu is None else gpu
    kind = "update" if element_slots is not None else "ragged" if length is None else "padded"
    entry = measured.entries().get((gpu, dim, itemsize, kind))
    # What won with many lookups a bag says nothing of bags with fewer than it loads at once.
    if entry is not None and (length is None or length >= entry.config.get("unroll", 1)):
        config: dict[str, Any] = {**entry.config}
        return TuningConfig(**config)
    registers, lanes = Tile.of(dim, itemsize).registers, Tile.of(dim, itemsize).lanes
    old = 0 if element_slots is None else 1 + element_slots  # tiles of the table and slots
    # Live beside the loads: the sum, and in an update the old row and its slots.
    unroll = _unroll(_SKEWED_UNROLL if length is None else min(length, _IN_FLIGHT), 1 + old, registers)
    chunks = 1
    if length is not None:  # one lookup or a few: more segments a thread instead
        blocks = Tile.of(dim, itemsize).blocks
        while blocks * unroll * chunks < _IN_FLIGHT and 2 * chunks * (1 + old + unroll) * registers <= _SHORT_REGISTERS:
            chunks *= 2
    return TuningConfig(
        chunks=chunks,
        unroll=unroll,
        # Long segments share the launch of short ones, so more registers than those need would cost warps; and a thread
        # holds the index, and the weight, of every lookup that falls to its lane, of this step and the next.
        long_unroll=min(unroll, 4 * lanes),
        top=_TOP,
        blocks=8 * MULTIPROCESSORS.get(gpu, 132) if kind == "update" else 2**20,
        # The old row waits in registers while the gradient is summed, which pays only while that costs no warps.
        prefetch=(1 + old + unroll) * chunks * registers <= 2 * _SHORT_REGISTERS,
    )


def sums_directly(*, segments: int, length: int, dim: int, itemsize: int, config: TuningConfig) -> bool:
    """Whether padded segments of ``length`` lookups are summed without pieces: where short, or as many as threads."""
    if length < 2 * config.split:
        return True
    warps = segments * Tile.of(dim, itemsize).lanes // 32
    return length <= _DIRECT and warps >= 8 * MULTIPROCESSORS[H200]


def runs_a_block(runs: int, tile: Tile) -> int:
    """How many runs a block looks through for long segments: more where that leaves two blocks a multiprocessor."""
    width = tile.lanes
    while width < _LOOKS * tile.lanes and runs > width * 2 * MULTIPROCESSORS[H200]:
        width *= 2
    return width


def _unroll(most: int, live: int, registers: int) -> int:
    """The largest power of two up to ``most`` whose rows fit the registers beside ``live`` other tiles; at least 1."""
    unroll = 1
    while 2 * unroll <= most and (live + 2 * unroll) * registers <= _SHORT_REGISTERS:
        unroll *= 2
    return unroll
