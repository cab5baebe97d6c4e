"""How often each warp of a kernel waits at a batch's real segments, counted as the kernels walk."""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.pallas import segments
from jrec.pallas.tile import WARP, Tile
from jrec.pallas.tuning import TuningConfig, runs_a_block

WARPS = 4  # of a thread block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments of a cast.

    Attributes:
      offsets: (segments + 1,) int64, ascending from 0 to the number of lookups.
      counts_by_table: Per table the lookups of each of its distinct rows.
    """

    offsets: np.ndarray
    counts_by_table: tuple[np.ndarray, ...]

    @staticmethod
    def of(ids: np.ndarray) -> Segments:
        """The segments of the cast of (tables, lookups) ids, where later tables have greater ids."""
        counts = tuple(np.unique(table, return_counts=True)[1] for table in ids)
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return Segments(offsets=offsets, counts_by_table=counts)

    @property
    def lookups(self) -> int:
        """How many lookups there are."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """(segments,) lookups of each."""
        return np.diff(self.offsets)

    def short(self, split: int) -> np.ndarray:
        """(segments,) whether each holds no full run."""
        low, high = self.offsets[:-1], self.offsets[1:]
        return -(-low // split) >= high // split


def by_warp(values: np.ndarray, tile: Tile) -> np.ndarray:
    """(tiles, 4) the greatest of each warp's rows, from a value a row.

    Row scalar ``(row, lane)`` lies in thread ``(row * lanes + lane) % 128``.
    """
    tiles = -(-values.size // tile.rows)
    padded = np.zeros(tiles * tile.rows, values.dtype)
    padded[: values.size] = values
    return padded.reshape(tiles, tile.chunks, WARPS, WARP // tile.lanes).max(axis=(1, 3))


def short_trips(cast_segments: Segments, tile: Tile, config: TuningConfig) -> np.ndarray:
    """(tiles, 4) steps of each warp of ``casted_update_short``."""
    lengths = np.where(cast_segments.short(config.split), cast_segments.lengths, 0)
    return -(-by_warp(lengths, tile) // config.unroll)


def full_nodes(cast_segments: Segments, config: TuningConfig) -> list[np.ndarray]:
    """Per level of pieces (nodes,) the segment that each node lies within, or -1."""
    levels = []
    for level, nodes in enumerate(segments.level_sizes(cast_segments.lookups, config.split, top=config.top)):
        size = config.split ** (level + 1)
        starts = np.arange(nodes) * size
        segment = np.searchsorted(cast_segments.offsets, starts, side="right") - 1
        levels.append(np.where(starts + size <= cast_segments.offsets[segment + 1], segment, -1))
    return levels


def long_steps(cast_segments: Segments, levels: int, config: TuningConfig) -> tuple[np.ndarray, np.ndarray]:
    """Which segments are long, and the steps of each range that ``add_nodes`` walks for them.

    Returns:
      (n,) first full run of each long segment, and (n, 2 * levels + 1) steps.
    """
    long = ~cast_segments.short(config.split)
    low, high = cast_segments.offsets[:-1][long], cast_segments.offsets[1:][long]
    first = -(-low // config.split)
    ranges = []
    walked = np.ones(low.size, bool)
    for _ in range(levels):
        up_low, up_high = -(-low // config.split), high // config.split
        inner = up_low < up_high
        head = np.where(inner, up_low * config.split, high) - low
        tail = np.where(inner, high - up_high * config.split, 0)
        ranges += [np.where(walked, head, 0), np.where(walked, tail, 0)]
        walked &= inner
        low, high = np.where(inner, up_low, 0), np.where(inner, up_high, 0)
    ranges.append(np.where(walked, high - low, 0))
    return first, -(-np.stack(ranges, axis=1) // config.long_unroll)


def long_walk(cast_segments: Segments, tile: Tile, config: TuningConfig) -> tuple[np.ndarray, np.ndarray, int]:
    """What warps of ``casted_update_long`` do.

    Returns:
      (tiles, 4) steps of each warp, (tiles, 4) visits that it makes, and how many runs each tile looks through.
    """
    nodes = full_nodes(cast_segments, config)
    width = runs_a_block(nodes[0].size, tile)
    first, steps = long_steps(cast_segments, len(nodes), config)
    tiles = -(-nodes[0].size // width)
    of_tile = first // width
    rank = np.arange(first.size) - np.searchsorted(of_tile, of_tile)  # segments are dealt to a tile's rows in order
    warp, turn = rank % tile.rows // (WARP // tile.lanes), rank // tile.rows
    turns = int(turn.max(initial=0)) + 1
    places, inverse = np.unique((of_tile * WARPS + warp) * turns + turn, return_inverse=True)
    greatest = np.zeros((places.size, steps.shape[1]), steps.dtype)
    np.maximum.at(greatest, inverse, steps)  # each range ends with its longest row of the warp
    total, visits = np.zeros(tiles * WARPS, np.int64), np.zeros(tiles * WARPS, np.int64)
    np.add.at(total, places // turns, greatest.sum(axis=1))
    np.add.at(visits, places // turns, 1)
    return total.reshape(tiles, WARPS), visits.reshape(tiles, WARPS), width
