"""Which examples are for training: the first ones in time, ones drawn by their number, all of certain files, or each
user's last but two.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jrec.data.columns import gather_all
from jrec.data.keys import mix64
from jrec.data.schema import DatasetError, LabelNumbers
from jrec.kernel_cache import compiled
from jrec.prepare.spill import PlainColumn, Spill

SPLITS = ("train", "valid", "test")
_READ_ROWS = 1 << 17
_Bounds = tuple[int, int, int]
SplitOf = Callable[[int, int], np.ndarray]
"""Of the examples from a number up to another one: (n,) uint8, each one's place in ``SPLITS``, or ``NO_SPLIT``."""
NO_SPLIT = len(SPLITS)


def split_bounds(rows: int, fractions: tuple[float, float, float]) -> _Bounds:
    """Where train, valid and test end among ``rows`` examples in order of time."""
    # 0.29 * 100 is 28.999999999999996 in float64; what is meant is 29.
    train = math.floor(rows * fractions[0] + 1e-6)
    valid = math.floor(rows * (fractions[0] + fractions[1]) + 1e-6)
    return train, min(valid, rows), rows


@compiled
def _draw(start, stop, seed, train, valid):
    """(stop - start,) uint8, the split of each example by its number."""
    drawn = np.empty(stop - start, np.uint8)
    mixed = mix64(seed)
    for i in range(start, stop):
        # By the example's number alone, so that pieces may be drawn in any order. 53 bits are what float64 holds: below
        # 1.
        share = float(mix64(np.uint64(i) ^ mixed) >> np.uint64(11)) * 2.0**-53
        drawn[i - start] = 0 if share < train else (1 if share < valid else 2)
    return drawn


def drawn_splits(
    new: Callable[[pathlib.Path], Spill], folder: pathlib.Path, spill: Spill, split_of: SplitOf
) -> tuple[Spill, _Bounds]:
    """The examples split by split; within a split they keep their order, and those in no split are left out.

    Args:
      new: Makes an empty spill of a folder.
      folder: For the examples; it must not exist.
      spill: The examples in order of time. Its files are deleted.
      split_of: Says which example is in which split, such as ``random_splits``.
    """
    drawn, ends = new(folder), []
    for split in range(len(SPLITS)):
        for start, chosen in _chosen(split_of, split, spill.rows):
            columns = {name: column.read(start, start + _READ_ROWS) for name, column in spill.columns.items()}
            drawn.append(gather_all(columns, chosen))
        ends.append(drawn.rows)
    drawn.finish()
    _remove(spill)
    return drawn, (ends[0], ends[1], ends[2])


def random_splits(fractions: tuple[float, float, float], seed: int) -> SplitOf:
    """Each example in a split by its number and the seed.

    Args:
      fractions: The fractions of train, valid and test, which the splits have approximately.
      seed: Another seed draws others.
    """
    # Two fractions may add up to a hair less than 1.
    train, valid = fractions[0], 1.0 if fractions[2] == 0 else fractions[0] + fractions[1]
    return lambda start, stop: _draw(start, stop, np.uint64(seed), train, valid)


def lines_of(split_of: SplitOf, rows: int, path: pathlib.Path) -> PlainColumn:
    """The numbers of the examples as ``drawn_splits`` puts them, int64, in a new file.

    Args:
      split_of: See ``drawn_splits``.
      rows: How many examples there are before.
      path: The file.
    """
    lines = PlainColumn(path, np.dtype(np.int64))
    for split in range(len(SPLITS)):
        for start, chosen in _chosen(split_of, split, rows):
            lines.append(start + chosen)
    lines.finish()
    return lines


def _chosen(split_of: SplitOf, split: int, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """The examples of a split, piece by piece: a piece's first row, and the chosen ones counted from it, not none."""
    for start in range(0, rows, _READ_ROWS):
        chosen = np.flatnonzero(split_of(start, min(start + _READ_ROWS, rows)) == split)
        if len(chosen):
            yield start, chosen


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


def check_labels(labels: PlainColumn, train_rows: int, column: str | None) -> None:
    """Refuses training examples of one label only, of which a model learns nothing.

    Args:
      labels: The labels of all examples, 0 or 1; the column is finished.
      train_rows: How many of them are for training.
      column: What the log calls them; None or "" if it has no such column.

    Raises:
      DatasetError: If the training examples have one label.
    """
    # Not 0 or 1 by name: a log of one label has either.
    first = labels.read(0, 1)

    def another(start: int, stop: int) -> bool:
        parts = (labels.read(at, min(at + _READ_ROWS, stop)) for at in range(start, stop, _READ_ROWS))
        return any((part != first).any() for part in parts)

    if train_rows < 2 or another(0, train_rows):
        return
    remedy = (
        "give lines of both labels, or say in [label] which column has them and which values are positive; for a log of"
        " positives alone pass --no-labels"
    )
    if another(train_rows, labels.rows):
        remedy = "other splits have the other one: if the log is in the order of its labels, pass --split-by random"
    raise DatasetError(
        f"{f'column {column!r}' if column else 'the log'}: the label of all {train_rows:,} training examples is"
        f" {first[0]:g}, so that there is nothing to learn; {remedy}"
    )


def label_numbers(labels: PlainColumn, train_rows: int) -> LabelNumbers | None:
    """What labels that are numbers are like; None where no example that counts has a known one.

    Args:
      labels: The labels of all examples, of several NaN where one is not known; the column is finished.
      train_rows: How many of them are for training; of 0, all count.
    """
    train_rows = train_rows or labels.rows
    count, mean, squares, least = 0, 0.0, 0.0, math.inf
    for start in range(0, labels.rows, _READ_ROWS):
        part = labels.read(start, min(start + _READ_ROWS, labels.rows)).astype(np.float64)
        least = min(least, float(part[~np.isnan(part)].min(initial=math.inf)))
        part = part[: max(0, train_rows - start)]
        if (part := part[~np.isnan(part)]).size:
            # Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
            gap, total = part.mean() - mean, count + part.size
            squares += ((part - part.mean()) ** 2).sum() + gap**2 * count * part.size / total
            mean, count = mean + gap * part.size / total, total
    if not count:
        return None
    return LabelNumbers(least=least, mean=float(mean), deviation=math.sqrt(squares / count))
