"""How often each warp of a kernel waits at a batch's real segments, counted as the kernels walk."""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.pallas import segments
from jrec.pallas.tile import WARP, Tile
from jrec.pallas.tuning import TuningConfig, runs_a_row

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


def short_trips(found: Segments, tile: Tile, config: TuningConfig) -> np.ndarray:
    """(tiles, 4) steps of each warp of ``casted_update_short``."""
    lengths = np.where(found.short(config.split), found.lengths, 0)
    return -(-by_warp(lengths, tile) // config.unroll)


def full_nodes(found: Segments, config: TuningConfig) -> list[np.ndarray]:
    """Per level of pieces (nodes,) the segment that each node lies within, or -1."""
    levels = []
    for level, nodes in enumerate(segments.level_sizes(found.lookups, config.split, top=config.top)):
        size = config.split ** (level + 1)
        starts = np.arange(nodes) * size
        segment = np.searchsorted(found.offsets, starts, side="right") - 1
        levels.append(np.where(starts + size <= found.offsets[segment + 1], segment, -1))
    return levels


def long_steps(found: Segments, levels: int, config: TuningConfig) -> tuple[np.ndarray, np.ndarray]:
    """Which segments are long, and the steps of each range that ``add_nodes`` walks for them.

    Returns:
      (n,) first full run of each long segment, and (n, 2 * levels + 1) steps.
    """
    long = ~found.short(config.split)
    low, high = found.offsets[:-1][long], found.offsets[1:][long]
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


def long_walk(found: Segments, tile: Tile, config: TuningConfig) -> tuple[np.ndarray, np.ndarray, int]:
    """What warps of ``casted_update_long`` do.

    Returns:
      (tiles, 4) steps of each warp, (tiles, 4) visits that it makes, and how many runs each row looks through.
    """
    nodes = full_nodes(found, config)
    take = runs_a_row(nodes[0].size, tile)
    first, steps = long_steps(found, len(nodes), config)
    groups = -(-nodes[0].size // take)
    tiles = -(-groups // tile.rows)
    of_group = first // take
    rank = np.arange(first.size) - np.searchsorted(of_group, of_group)  # a row visits its segments in order
    rows_a_warp = WARP // tile.lanes
    warp = of_group // rows_a_warp  # with one row a thread, warps take neighbouring rows
    places, inverse = np.unique(warp * take + rank, return_inverse=True)
    greatest = np.zeros((places.size, steps.shape[1]), steps.dtype)
    np.maximum.at(greatest, inverse, steps)  # each range ends with its longest row of the warp
    total, visits = np.zeros(tiles * WARPS, np.int64), np.zeros(tiles * WARPS, np.int64)
    np.add.at(total, places // take, greatest.sum(axis=1))
    np.add.at(visits, places // take, 1)
    return total.reshape(tiles, WARPS), visits.reshape(tiles, WARPS), take
