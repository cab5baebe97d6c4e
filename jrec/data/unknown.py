"""Which values of a log training did not see: counted by feature, beside training's share, with a few of them.

A model scores an unknown value as the mean of all rare ones, and says nothing. So one column that another program
wrote in another way gives wrong scores without an error: whoever reads raw values counts them here.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from jrec.data.columns import Column, ListColumn
from jrec.data.keys import MISSING, decode_keys, is_text
from jrec.data.schema import CategoricalFeature, DatasetError, Schema

if TYPE_CHECKING:
    from jrec.data.long_texts import LongTexts

RowsOfKeys = Callable[[np.ndarray], np.ndarray]
SHOWN = 3
MORE = 0.2
"""How much more of a feature's values than in training may be unknown before it is worth a warning."""
ENOUGH = 100
"""Values of a feature from which on their share says something."""
_PACKAGE = str(pathlib.Path(__file__).parents[1])


class UnknownValuesWarning(UserWarning):
    """Many more values of a feature are unknown than in training."""


@dataclasses.dataclass
class UnknownOfFeature:
    """The values of a feature that were read.

    Attributes:
      values: How many, without missing ones.
      unknown: How many of them have no row of their own.
      trained: The share of training's values, of all features of the table, that have none; None where the dataset does
        not say.
      examples: Some of the unknown ones.
    """

    values: int = 0
    unknown: int = 0
    trained: float | None = None
    examples: list[str] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the values, those that are unknown: 0 to 1."""
        return self.unknown / self.values if self.values else 0.0

    @property
    def is_much(self) -> bool:
        """Whether many more are unknown than in training; of few values nothing is said."""
        return self.values >= ENOUGH and self.share > (self.trained or 0.0) + MORE

    def remark(self, name: str) -> str:
        """A sentence about the feature of that name."""
        such = f", such as {', '.join(self.examples)}" if self.examples else ""
        return (
            f"of the values of {name!r} training did not see {self}{such}; the model cannot tell them apart, so see"
            " that the column is written as in training"
        )

    def __str__(self) -> str:
        trained = "" if self.trained is None else f", in training {self.trained:.1%}"
        return f"{self.share:.1%} of {self.values:,}{trained}"


class UnknownCounts:
    """Values and unknown ones by feature. Any thread may add some.

    Attributes:
      features: What was counted, by feature.
    """

    def __init__(self) -> None:
        self.features: dict[str, UnknownOfFeature] = {}
        self._lock = threading.Lock()
        self._warned = set[str]()

    def count(
        self, name: str, values: int, unknown: int, examples: Iterable[str] = (), *, trained: float | None = None
    ) -> None:
        """Adds values of a feature.

        Args:
          name: The feature.
          values: How many, without missing ones.
          unknown: How many of them have no row of their own.
          examples: Some of the unknown ones, as messages show them; not read where there are enough.
          trained: The share of training's values that have none; None where nobody says.
        """
        with self._lock:
            counts = self.features.setdefault(name, UnknownOfFeature(trained=trained))
            counts.values += values
            counts.unknown += unknown
            if unknown and len(counts.examples) < SHOWN:
                counts.examples = list(dict.fromkeys([*counts.examples, *examples]))[:SHOWN]

    def take(self, call: UnknownCounts, most: float | None) -> None:
        """Adds what one call has read, and warns, once a feature, where many more values are unknown than in training.

        Args:
          call: What the call read.
          most: The largest share of a feature's values in that call, 0 to 1, that may be unknown; None for any.

        Raises:
          DatasetError: If more are.
        """
        # Each call by itself, before it counts: one bad batch must not hide behind many good ones.
        call.check(most, remedy="raise max_unknown")
        for name, read in call.features.items():
            self.count(name, read.values, read.unknown, read.examples, trained=read.trained)
            counts = self.features[name]
            if counts.is_much and name not in self._warned:
                self._warned.add(name)
                warnings.warn(counts.remark(name), UnknownValuesWarning, skip_file_prefixes=(_PACKAGE,))

    def remarks(self) -> list[str]:
        """A line about every feature of which many more values are unknown than in training, and one about all."""
        read = {name: counts for name, counts in self.features.items() if counts.values}
        lines = [f"warning: {counts.remark(name)}" for name, counts in read.items() if counts.is_much]
        if read:
            shares = "; ".join(f"{name} {counts}" for name, counts in read.items())
            lines.append(f"values that training did not see: {shares}")
        return lines

    def to_dict(self) -> dict[str, dict[str, float | int | None]]:
        """By feature of which values were read, in JSON types: values, unknown, share, and training's share."""
        return {
            name: {
                "values": counts.values, "unknown": counts.unknown, "share": counts.share, "trained": counts.trained
            }
            for name, counts in self.features.items()
            if counts.values
        }  # fmt: skip

    def check(self, most: float | None, *, remedy: str = "raise --max-unknown") -> None:
        """Refuses features of which too many values are unknown.

        Args:
          most: The largest share, 0 to 1; None for any.
          remedy: What to do where that is meant.

        Raises:
          DatasetError: Naming the feature, its share and some of the values.
        """
        for name, counts in self.features.items():
            if most is not None and counts.share > most:
                raise DatasetError(
                    f"of the values of {name!r} training did not see {counts}, such as {', '.join(counts.examples)};"
                    f" at most {most:.1%} may be unknown: write the column as in training, or {remedy}"
                )


class UnknownValues(UnknownCounts):
    """Unknown values of a dataset's features, by their keys and rows.

    Args:
      schema: The dataset's, whose tables say which row unknown values have. Hashed tables know every value.
      growing: By table that grows, a function from (n,) uint64 keys to (n,) rows, 0 for those without one, or None
        where rows, not keys, are added; tables that are not here are left out.

    Crosses are left out: many of their values are new wherever pairs are rare, and their features' values are counted.
    """

    def __init__(self, schema: Schema, growing: Mapping[str, RowsOfKeys | None] | None = None):
        super().__init__()
        tables = {table.name: table for table in schema.tables}
        self._growing = growing or {}
        self._oov_rows: dict[str, int] = {}
        crosses = schema.crosses
        for feature in schema.categorical:
            table = tables[feature.table]
            if feature.name in crosses:
                continue
            row = 0 if table.growing else table.oov_row
            if row is not None and (not table.growing or table.name in self._growing):
                self.features[feature.name] = UnknownOfFeature(trained=table.oov_share)
                self._oov_rows[feature.name] = row

    def add(self, feature: CategoricalFeature, keys: Column, rows: Column, texts: LongTexts | None = None) -> None:
        """Counts the values of a feature.

        Args:
          feature: The feature.
          keys: (n,) uint64 keys, or lists of them.
          rows: Their rows, of the same form; of a table that grows they may be keys.
          texts: The texts of those keys that are hashes, where they are known.
        """
        if feature.name not in self.features:
            return
        key_values, row_values = _values(keys), _values(rows)
        if (rows_of_keys := self._growing.get(feature.table)) is not None:
            row_values = rows_of_keys(key_values)
        values = int(np.count_nonzero(key_values))  # the key of a missing value is 0
        at_oov = row_values == self._oov_rows[feature.name]
        if not at_oov.any():  # of most requests nothing is unknown, and they wait for this
            self.count(feature.name, values, 0)
            return
        unknown = key_values[at_oov & (key_values != MISSING)]
        more = _texts(unknown, texts) if len(self.features[feature.name].examples) < SHOWN else ()
        self.count(feature.name, values, unknown.size, more)

    def add_values(self, name: str, keys: np.ndarray, known: np.ndarray, *, trained: float | None) -> None:
        """Counts values that are no feature's: (n,) uint64 keys, and which of them training saw, (n,) bool."""
        present = keys != MISSING
        unknown = keys[present & ~known]
        self.count(name, int(np.count_nonzero(present)), unknown.size, _texts(unknown, None), trained=trained)

    def add_rows(self, feature: CategoricalFeature, rows: Column) -> None:
        """Counts the values of a feature by their rows, (n,) or lists, as a dataset's blocks hold them."""
        if feature.name in self.features:
            row_values = _values(rows)
            unknown = int(np.count_nonzero(row_values == self._oov_rows[feature.name]))
            self.count(feature.name, row_values.size, unknown)


def _values(column: Column) -> np.ndarray:
    if isinstance(column, ListColumn):
        return np.asarray(column.values[column.offsets[0] : column.offsets[-1]])
    return np.asarray(column)


def _texts(keys: np.ndarray, texts: LongTexts | None) -> list[str]:
    """Some different values as texts; those whose texts nobody has are left out."""
    some = np.unique(keys[:1000])
    short = some[~is_text(some)][:SHOWN]
    ends, content = decode_keys(short, np.empty(0, np.int64), np.empty(0, np.uint8))
    shown = [content[ends[k] : ends[k + 1]].tobytes() for k in range(len(short))]
    if texts is not None:
        where = np.flatnonzero(np.isin(texts.keys, some))[: SHOWN - len(shown)].tolist()
        shown += [texts.buffer[texts.starts[k] : texts.ends[k]].tobytes() for k in where]
    return [repr(text.decode(errors="replace")[:60]) for text in shown]
