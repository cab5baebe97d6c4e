"""When the examples of a dataset were: seconds since 1970 of every 64th of a split, in ``times/SPLIT.npy``.

Examples of a split are in order of time, so that a binary search finds where a moment lies among them to 64 examples,
less than a batch, in a file of an eighth of a byte an example.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from jrec.data.schema import DatasetError, Schema
from jrec.files import sha256_of

STRIDE = 64
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_CENTURY = 100 * 366 * 86400


def duration_seconds(text: str) -> int | None:
    """The seconds of a duration such as "7d", "12h", "30m" or "45s", 1 to 100 years; None where it is none."""
    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdigit()) or len(number) > len(str(_CENTURY)):
        return None
    seconds = int(number) * unit
    return seconds if 1 <= seconds <= _CENTURY else None


def moments_file(split: str) -> str:
    """The file of a split's moments, relative to the dataset."""
    return f"times/{split}.npy"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """When the examples of a split were.

    Attributes:
      seconds: (ceil(examples / STRIDE) + 1,) int64, ascending: the seconds since 1970 of every ``STRIDE``-th example
        from the first on, and of the last one.
      examples: The examples of the split.
    """

    seconds: np.ndarray
    examples: int

    @property
    def first(self) -> int:
        """Seconds since 1970 of the first example."""
        return int(self.seconds[0])

    @property
    def last(self) -> int:
        """Seconds since 1970 of the last example."""
        return int(self.seconds[-1])

    def examples_before(self, moment: int) -> int:
        """How many examples were before a moment, in seconds since 1970; up to ``STRIDE`` - 1 too many."""
        # Without the last entry, which is no multiple of the stride.
        return min(int(np.searchsorted(self.seconds[:-1], moment)) * STRIDE, self.examples)

    def recency(self, start: int, stop: int, half_life: int) -> np.ndarray:
        """How much examples count where an example counts half as much as one ``half_life`` seconds after it.

        Args:
          start, stop: The first example, and one past the last.
          half_life: In seconds.

        Returns:
          (stop - start,) float32, 1 for the last example of the split. Between the examples whose second is known
          others lie evenly.
        """
        seconds = self.seconds[start // STRIDE : -(-stop // STRIDE) + 1]
        known = np.minimum((start // STRIDE + np.arange(len(seconds))) * STRIDE, self.examples - 1)
        ages = self.last - np.interp(np.arange(start, stop), known, seconds.astype(np.float64))
        return np.exp2(-ages / half_life).astype(np.float32)

    @staticmethod
    def load(folder: str | os.PathLike[str], schema: Schema, split: str) -> Moments:
        """Reads and checks the moments of a split.

        Raises:
          DatasetError: If the dataset has none, or the file is damaged.
        """
        file, examples = moments_file(split), schema.splits[split].examples
        if file not in schema.files:
            raise DatasetError(
                f"{folder} does not say when its {split} examples were: its log has no time, or was prepared by an"
                " earlier version; prepare it again, with a [time] in the schema whose format is no plain integer"
            )
        path = schema.check_file(folder, file)
        try:
            seconds = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path} cannot be read ({error}); prepare the dataset again") from error
        if seconds.dtype != np.int64 or seconds.shape != (-(-examples // STRIDE) + 1,) or (np.diff(seconds) < 0).any():
            raise DatasetError(f"{path} is not of {examples:,} examples in order of time; prepare the dataset again")
        return Moments(seconds=seconds, examples=examples)


def save_moments(folder: pathlib.Path, split: str, parts: Iterable[np.ndarray]) -> dict[str, str]:
    """Writes the moments of a split.

    Args:
      folder: The dataset.
      split: The split.
      parts: (n,) int64 seconds since 1970 of its examples, in their order, part by part; all parts but the last are of
        a multiple of ``STRIDE`` examples.

    Returns:
      The file's SHA-256 by its name relative to the dataset; nothing of a split without examples.
    """
    strided, last = [], np.empty(0, np.int64)
    for part in parts:
        # Parts are multiples of the stride, so that the places go on from part to part.
        strided.append(part[::STRIDE])
        last = part[-1:]
    if not last.size:
        return {}
    file = moments_file(split)
    (folder / file).parent.mkdir(exist_ok=True)
    np.save(folder / file, np.concatenate([*strided, last]), allow_pickle=False)
    return {file: sha256_of(folder / file)}
