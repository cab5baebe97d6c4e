"""Which examples are for training: the first ones in time, ones drawn by their number, or those of certain files."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jrec.data.columns import gather_all
from jrec.data.readers.keys import mix64
from jrec.data.spill import Spill
from jrec.kernel_cache import compiled

SPLITS = ("train", "valid", "test")
_READ_ROWS = 1 << 17
_Bounds = tuple[int, int, int]


def split_bounds(rows: int, fractions: tuple[float, float, float]) -> _Bounds:
    """Where train, valid and test end among ``rows`` examples in order of time."""
    train = math.floor(rows * fractions[0] + 1e-6)
    valid = math.floor(rows * (fractions[0] + fractions[1]) + 1e-6)
    return train, min(valid, rows), rows


@compiled
def _draw(start, stop, seed, train, valid):
    """(stop - start,) uint8, the split of each example by its number."""
    drawn = np.empty(stop - start, np.uint8)
    mixed = mix64(seed)
    for i in range(start, stop):
        share = float(mix64(np.uint64(i) ^ mixed) >> np.uint64(11)) * 2.0**-53
        drawn[i - start] = 0 if share < train else (1 if share < valid else 2)
    return drawn


def drawn_splits(
    new: Callable[[pathlib.Path], Spill],
    folder: pathlib.Path,
    spill: Spill,
    fractions: tuple[float, float, float],
    seed: int,
) -> tuple[Spill, _Bounds]:
    """The same examples, each drawn into a split by its number and the seed; within a split they keep their order.

    Args:
      new: Makes an empty spill of a folder.
      folder: For the examples; it must not exist.
      spill: The examples in order of time. Its files are deleted.
      fractions: Of train, valid and test. Splits have about these.
      seed: Another seed draws others.
    """
    # Two fractions may add up to a hair less than 1.
    train, valid = fractions[0], 1.0 if fractions[2] == 0 else fractions[0] + fractions[1]

    def pieces(split: int) -> Iterator[tuple[int, int, np.ndarray]]:
        for start in range(0, spill.rows, _READ_ROWS):
            stop = min(start + _READ_ROWS, spill.rows)
            yield start, stop, np.flatnonzero(_draw(start, stop, np.uint64(seed), train, valid) == split)

    drawn, ends = new(folder), []
    for split in range(len(SPLITS)):
        for start, stop, chosen in pieces(split):
            if len(chosen):
                columns = {name: column.read(start, stop) for name, column in spill.columns.items()}
                drawn.append(gather_all(columns, chosen))
        ends.append(drawn.rows)
    drawn.finish()
    _remove(spill)
    return drawn, (ends[0], ends[1], ends[2])


def joined_splits(
    new: Callable[[pathlib.Path], Spill], folder: pathlib.Path, spills: Mapping[str, Spill]
) -> tuple[Spill, _Bounds]:
    """The examples of every split's spill, one after the other. Deletes those spills' files."""
    joined, ends = new(folder), []
    for name in SPLITS:
        if (spill := spills.get(name)) is not None:
            for start in range(0, spill.rows, _READ_ROWS):
                joined.append({n: column.read(start, start + _READ_ROWS) for n, column in spill.columns.items()})
            _remove(spill)
        ends.append(joined.rows)
    joined.finish()
    return joined, (ends[0], ends[1], ends[2])


def _remove(spill: Spill) -> None:
    for column in spill.columns.values():
        column.remove()


def flat(inputs: Mapping[str, Sequence[str]]) -> list[str]:
    """All inputs, in order of the splits."""
    return [path for paths in inputs.values() for path in paths]
