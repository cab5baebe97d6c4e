"""Tuning of the tensor-train kernels: pure functions of shapes, with the limits of the chip checked.

Nothing here has been measured; see ``tuning``.
"""

from __future__ import annotations

import dataclasses

from jrec.pallas.tt.block import Block
from jrec.pallas.tuning import H200, MULTIPROCESSORS

WIDE = 32  # columns from which slices fill a warp's lanes, so that multiplying slice by slice pays
WGMMA_ROWS = 64  # of a tile of the tensor cores
WGMMA_TERMS = 256  # that shared memory holds of a tile's right factor, with room for other blocks
# Terms of a tile's left rows that registers hold at once. Beside an accumulator of 128 columns, 192 float32 terms
# spill, and so do 128 with the addresses of a second load.
_WGMMA_DEPTH, _WGMMA_DEPTH_OF_SEVERAL = 128, 64
SHARED_BYTES = 227 * 1024  # that one block may have on a Hopper GPU, where alone these tiles are used
_SPLIT = 64
_PIECE_FLOATS = 1 << 24  # of the lowest level's partial sums: 64 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """How ``reduce_products`` is laid out.

    Attributes:
      block: How blocks cover a product.
      split: See ``TuningConfig``.
      blocks: See ``TuningConfig``.
    """

    block: Block
    split: int = _SPLIT
    blocks: int = 2**20

    def __post_init__(self) -> None:
        if self.split < 2 or self.split & (self.split - 1):
            raise ValueError(f"split={self.split} must be a power of two, at least 2")
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaConfig:
    """How ``wgmma_products`` is laid out: tiles of 64 rows.

    Attributes:
      entries: How many entries of one right factor a tile holds.
      columns: How many columns a tile has.
      depth: Terms of the left rows that registers hold at once.
      swizzle: Bytes of the pattern in which right factors lie in shared memory.
      shared_bytes: How many bytes of shared memory are used.
    """

    entries: int
    columns: int
    depth: int
    swizzle: int
    shared_bytes: int

    def __post_init__(self) -> None:
        if self.depth < 1 or self.depth % (self.swizzle // 2):
            raise ValueError(f"depth={self.depth} must be a multiple of {self.swizzle // 2}")
        if not 1 <= self.entries <= WGMMA_ROWS:
            raise ValueError(f"entries={self.entries} must be from 1 to {WGMMA_ROWS}")
        if self.columns % (self.swizzle // 2) or self.columns > 128:
            raise ValueError(f"columns={self.columns} must be a multiple of {self.swizzle // 2} up to 128")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"shared_bytes={self.shared_bytes} exceed the {SHARED_BYTES} that a block may have")


def fits_wgmma(*, height: int, terms: int, width: int) -> bool:
    """Whether tiles of the tensor cores fit products of (height, terms) by (terms, width) bfloat16 factors."""
    return height <= WGMMA_ROWS and terms % 16 == 0 and terms <= WGMMA_TERMS and width % 32 == 0


def tune_wgmma(*, height: int, terms: int, width: int) -> WgmmaConfig:
    """The config for products on tensor cores.

    Raises:
      ValueError: Where no tile fits.
    """
    if not fits_wgmma(height=height, terms=terms, width=width):
        raise ValueError(
            f"products of {height=}, {terms=} and {width=} fit no tile: height must be at most {WGMMA_ROWS}, terms a"
            f" multiple of 16 up to {WGMMA_TERMS}, width a multiple of 32"
        )
    # Instructions come in groups as deep as the swizzle is wide.
    swizzle = next(s for s in (128, 64, 32) if terms % (s // 2) == 0 and width % (s // 2) == 0)
    columns = next(c for c in (128, 64, 32) if width % c == 0)
    return WgmmaConfig(
        entries=WGMMA_ROWS // height,
        columns=columns,
        depth=_WGMMA_DEPTH if terms <= _WGMMA_DEPTH else _WGMMA_DEPTH_OF_SEVERAL,
        swizzle=swizzle,
        shared_bytes=terms * columns * 2,
    )


def tune_reduce(*, height: int, width: int, positions: int) -> ReduceConfig:
    """The config for sums of (height, width) products over ``positions`` of them in all."""
    split = _SPLIT
    # Each run leaves a piece of a whole product: a longer run leaves fewer, at the cost of more additions a thread.
    while positions // split * height * width > _PIECE_FLOATS and split < positions:
        split *= 2
    return ReduceConfig(block=Block.of(height, width), split=split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductConfig:
    """How ``grouped_products`` is laid out.

    Attributes:
      block: How blocks cover the products of one run of entries, below one another.
      entries: How many entries of one right factor are multiplied together, a run.
      blocks: See ``TuningConfig``.
    """

    block: Block
    entries: int
    blocks: int = 16 * MULTIPROCESSORS[H200]

    def __post_init__(self) -> None:
        if self.entries < 1 or self.block.height % self.entries:
            height = self.block.height
            raise ValueError(f"entries={self.entries} must be at least 1 and divide the block's {height=}")


def tune_single(*, height: int, width: int) -> ReduceConfig:
    """The config for (height, width) products that are not summed: no segment is ever split."""
    return ReduceConfig(block=Block.of(height, width), split=2**30)


def tune_product(*, height: int, width: int) -> ProductConfig:
    """The config for (height, width) products: as many entries a run as fill 8 rows of every thread."""
    # Of a matrix too tall to matter, to see how many rows a block of this width has.
    entries = max(1, Block.of(1 << 20, width).rows // height)
    return ProductConfig(block=Block.of(entries * height, width), entries=entries)


def check_int32(name: str, count: int) -> None:
    """Raises NotImplementedError where int32 does not number that many."""
    if count >= 2**31:
        raise NotImplementedError(
            f"{count:,} {name} are more than int32 numbers; use implementation='xla' or smaller batches"
        )
