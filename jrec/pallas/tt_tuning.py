"""Tuning of the tensor-train kernels: pure functions of shapes, with the limits of the chip checked.

Nothing here has been measured; see ``tuning``.
"""

from __future__ import annotations

import dataclasses

from jrec.pallas.tt_block import Block

_SPLIT = 64
_PIECE_FLOATS = 1 << 24  # of the lowest level's partial sums: 64 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """How ``reduce_products`` is laid out.

    Attributes:
      block: how blocks cover a product.
      split: see ``TuningConfig``.
      blocks: see ``TuningConfig``.
    """

    block: Block
    split: int = _SPLIT
    blocks: int = 2**20

    def __post_init__(self) -> None:
        if self.split < 2 or self.split & (self.split - 1):
            raise ValueError(f"split={self.split} must be a power of two, at least 2")
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks} must be at least 1")


def tune_reduce(*, height: int, width: int, positions: int) -> ReduceConfig:
    """The config for sums of (height, width) products over ``positions`` of them in all."""
    split = _SPLIT
    while positions // split * height * width > _PIECE_FLOATS and split < positions:
        split *= 2
    return ReduceConfig(block=Block.of(height, width), split=split)


def check_int32(what: str, count: int) -> None:
    """Raises ValueError where int32 does not number that many."""
    if count >= 2**31:
        raise ValueError(f"{count:,} {what} are more than int32 numbers; use implementation='xla' or smaller batches")
