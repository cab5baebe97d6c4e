"""What every raw log looks like to preparation: named features, and chunks of examples in the order of the files."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

from jrec.data.blocks import EXAMPLE_WEIGHT
from jrec.data.columns import Column, ListColumn
from jrec.data.keys import integer_keys
from jrec.data.long_texts import LongTexts
from jrec.data.schema import DatasetError, DenseFeature, Schema
from jrec.json_values import JsonObject
from jrec.prepare.readers.parse import Dialect, Field, ParsedBlock

Labels = Literal["required", "optional", "none"]
MAX_INTEGER_ID = 2**56 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """The values of feature ``of`` in the earlier lines with the same value of feature ``by``, the last ``length``.

    ``ages``, if not "", names the column that lines to predict have with how long before the line each of them was.
    """

    by: str
    of: str
    length: int
    ages: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetMean:
    """Two dense features of a value, or of a combination of values, of the categorical features ``of``.

    ``{name}_mean`` is the label's mean in the lines of training with that value, as if ``smoothing`` more lines had the
    mean of all; ``{name}_count`` is the logarithm of 1 + their number. A line of training counts lines in other folds
    than its own, or with ``folds`` 0 those that are earlier, only of the last ``window`` if there is one ("7d").
    Fewer than ``min_count`` lines count as none. ``label`` names one of several labels.
    """

    of: tuple[str, ...]
    name: str = ""
    label: str = ""
    smoothing: float = 10.0
    min_count: int = 1
    folds: int | None = None
    window: str = ""

    @property
    def title(self) -> str:
        """What the features' names begin with."""
        return self.name or "_".join(self.of)

    @property
    def features(self) -> tuple[str, str]:
        """The names of the mean and of the count."""
        return f"{self.title}_mean", f"{self.title}_count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CategoricalSpec:
    """A categorical feature before preparation: ``max_length`` None stands for the longest list of the log.

    ``quantiles``, if not 0, is the number of buckets that its numbers fall into, ``boundaries`` what lies between.
    ``aged`` says that the weights are ages (``CategoricalFeature``). ``min_count`` is its table's own, if any.
    """

    name: str
    table: str
    many: bool = False
    weighted: bool = False
    aged: bool = False
    max_length: int | None = None
    fixed_length: bool = False
    quantiles: int = 0
    boundaries: tuple[float, ...] | None = None
    min_count: int | None = None

    @property
    def unfitted(self) -> bool:
        """Whether its values are numbers whose buckets are yet to be learnt."""
        return self.quantiles > 0 and self.boundaries is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Examples of a log.

    Attributes:
      labels: (n,) float32 in {0, 1}, or numbers; zeros where the log has none. Of several the first.
      dense: By feature, (n,) float32, transformed and finite; float64 raw values of unfitted features.
      keys: By feature, (n,) uint64, or a list of them for features with ``many``; float64 numbers of unfitted features.
      weights: By weighted feature, lists of finite float32 of the lengths of its keys.
      times: (n,) int64 by which examples are ordered, or None where the order of the files is the order of time.
      texts: By feature, the texts whose keys are hashes.
      tasks: By task but the first, (n,) float32 labels of a log with several, whose ``labels`` are the first task's; -1
        is a label that is not known, in ``labels`` too, or NaN of one that is a number. Under ``EXAMPLE_WEIGHT`` the
        weights of a log that has them.
    """

    labels: np.ndarray
    dense: Mapping[str, np.ndarray]
    keys: Mapping[str, Column]
    weights: Mapping[str, ListColumn] = dataclasses.field(default_factory=dict)
    times: np.ndarray | None = None
    texts: Mapping[str, LongTexts] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class LogFormat:
    """A raw log format. Subclasses set the attributes and override what they need.

    Attributes:
      name: The format's name, which becomes the dataset's.
      dense, categorical: The features in order.
      timed: Whether chunks carry times, so that examples are sorted by them.
      passes: How often ``assemble`` passes over the log; with 2 it reads all before it yields.
      columns: The parsed column (by name) that each categorical feature's long texts come from.
      labels: Whether the log must have labels; "optional" takes them where a file has them, "none" ignores them.
      label: The field of the label, of formats of which there can be logs without one; "" where this log has none, and
        None for formats that make labels themselves.
      tasks: The names of the labels where there are several, the first of which are ``Chunk.labels``; else ().
      task_fields: Their fields.
      weighted: Whether examples have weights.
      numeric_labels: The tasks whose labels are numbers, and not 0 or 1; "" of the only label.
      complete: The dense features of which no value may be missing in a log.
      histories: By feature that preparation makes of all lines, what it is made of; chunks lack these features.
      steps: Features that are histories of the same earlier lines, each line's values in one place; datasets of earlier
        versions have none.
      target_means: What preparation makes of labels and keys of all lines; chunks lack these dense features.
      ticks: How many of the units of times a second has.
      key_seed: The seed of the hash of long values in files that are joined to the log; None where there are none.
    """

    name: str
    dense: tuple[DenseFeature, ...] = ()
    categorical: tuple[CategoricalSpec, ...] = ()
    timed: bool = False
    passes: int = 1
    labels: Labels = "required"
    label: str | None = None
    tasks: tuple[str, ...] = ()
    task_fields: tuple[str, ...] = ()
    weighted: bool = False
    numeric_labels: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    histories: Mapping[str, History] = {}
    steps: tuple[tuple[str, ...], ...] = ()
    target_means: tuple[TargetMean, ...] = ()
    ticks: int = 1
    key_seed: int | None = None

    def with_labels(self, labels: Labels) -> Self:
        """The same log, whose labels are required, optional, or none.

        Raises:
          DatasetError: If all logs of this format have labels.
        """
        if labels != "required" and self.label is None:
            raise DatasetError(f"{self.name} makes labels of what every line says; leave --no-labels out")
        other = copy.copy(self)
        other.labels = labels
        if labels == "none":
            other.tasks, other.task_fields = (), ()
            other.weighted, other.numeric_labels = False, frozenset()
        return other

    @property
    def beside_labels(self) -> tuple[str, ...]:
        """The names of ``Chunk.tasks``."""
        return (*self.tasks[1:], *([EXAMPLE_WEIGHT] if self.weighted else []))

    @property
    def dated(self) -> bool:
        """Whether times are moments since 1970, and say more than an order."""
        return self.timed

    @property
    def divisible(self) -> bool:
        """Whether parts of the log can be read apart, each by a copy of this format, and then put together."""
        return type(self).assemble is LogFormat.assemble and type(self).survey is LogFormat.survey

    def check_parts(self, parts: Sequence[Self]) -> None:
        """Raises a DatasetError if the parts that these copies have assembled make no log together."""

    @property
    def has_fields(self) -> bool:
        """Whether a line makes an example, so that ``raw_fields`` says what of."""
        return type(self).raw_fields is not LogFormat.raw_fields

    def raw_fields(self) -> tuple[Field, ...]:
        """The fields that features are made of, where a line makes an example; without the label."""
        raise NotImplementedError

    def dialect(self, path: str) -> Dialect:
        """How the lines of a file split into fields; may look at the file's first line."""
        raise NotImplementedError

    def convert(self, parsed: ParsedBlock) -> Any:
        """One block's rows, rejecting those that make no sense; called from several threads."""
        raise NotImplementedError

    def survey(self, converted: Callable[[], Iterator[Any]]) -> None:
        """A first look at the whole log before it is read, for formats that need one; ``converted`` iterates it."""

    def begin(self, folder: pathlib.Path, advance: Callable[[float], None]) -> None:
        """Comes before ``assemble``: a folder to make for temporary files; ``advance`` takes the share of pass 2."""

    def assemble(self, converted: Iterator[Any]) -> Iterator[Chunk]:
        """Chunks from what ``convert`` returned, in the order of the files; called from one thread."""
        return converted

    def limited(self, lengths: Mapping[str, int]) -> LogFormat:
        """The same log, where lists of no given ``max_length`` have at most these lengths, by feature."""
        return self

    def fitted(self, dense: Mapping[str, DenseFeature], boundaries: Mapping[str, tuple[float, ...]]) -> LogFormat:
        """The same log, whose features know what was learnt of the training examples, by feature."""
        return self

    def predicted(self) -> LogFormat:
        """The same log as one that is only predicted: its lines may lack what the lines of training may not."""
        return self

    def options(self) -> JsonObject:
        """The format's own options, for the dataset's provenance."""
        return {}

    def with_joined(self, files: Mapping[str, str]) -> LogFormat:
        """The same log, some of whose joined files lie elsewhere.

        Args:
          files: Paths by the joined file's name.

        Raises:
          DatasetError: If the log has no joined file of such a name.
        """
        if files:
            raise DatasetError(
                f"--join names {next(iter(files))!r}, but {self.name!r} has no joined files; leave it out"
            )
        return self

    def joined_inputs(self) -> list[dict[str, object]]:
        """The joined files, for the dataset's provenance.

        Raises:
          DatasetError: If one cannot be read.
        """
        return []

    def load_joined(self, *, key_seed: int, threads: int) -> None:
        """Reads the joined files into memory; comes before any line is converted.

        Args:
          key_seed: The seed of the hash of long values.
          threads: Threads that parse.

        Raises:
          DatasetError: If one cannot be read, is malformed, or does not fit memory.
        """

    def prejoined(self) -> LogFormat:
        """The same log as one whose lines have the columns of the joined files too, called as their features."""
        return self

    def remarks(self) -> list[str]:
        """Warnings about the log; call after ``assemble`` has passed over it."""
        return []


def learned_of(schema: Schema) -> tuple[dict[str, DenseFeature], dict[str, tuple[float, ...]]]:
    """What a dataset's features know of its training examples, as ``LogFormat.fitted`` takes it."""
    boundaries = {f.name: f.boundaries for f in schema.categorical if f.boundaries is not None}
    learned = {f.name: f for f in schema.dense if f.mean is not None or f.missing is not None}
    return learned, boundaries


def steps_of(schema: Schema) -> tuple[tuple[str, ...], ...]:
    """Which of a dataset's features are histories of the same earlier lines, as ``LogFormat.steps``."""
    options = schema.preparation.get("format_options")
    stored = options.get("steps") if isinstance(options, Mapping) else None
    return tuple(map(tuple, stored)) if isinstance(stored, list) else ()


def one_hot(*names: str) -> tuple[CategoricalSpec, ...]:
    """Features of one id an example, each with a table of its own name."""
    return tuple(CategoricalSpec(name=n, table=n, max_length=1, fixed_length=True) for n in names)


def reject_labels(parsed: ParsedBlock, name: str) -> None:
    """Rejects rows whose label is neither 0 nor 1, where the log has labels."""
    if name not in parsed.columns:
        return
    values = parsed.numbers(name)
    parsed.reject((values != 0) & (values != 1), name, "is neither 0 nor 1")


def has_label(dialect: Dialect, name: str) -> bool:
    """Whether a file has labels in the field of that name."""
    return any(field.name == name and field.kind != "skip" for field in dialect.fields)


def labels_of(parsed: ParsedBlock, name: str) -> np.ndarray:
    """(rows,) float32 labels; zeros where the log has none."""
    return parsed.numbers(name).astype(np.float32) if name in parsed.columns else np.zeros(parsed.rows, np.float32)


def reject_ids(parsed: ParsedBlock, *names: str) -> None:
    """Rejects rows whose integer ids are negative or of more than 56 bits."""
    for name in names:
        values = parsed.numbers(name)
        parsed.reject((values < 0) | (values > MAX_INTEGER_ID), name, "is not an id between 0 and 2^56 - 1")


def texts_by_feature(parsed: ParsedBlock, features: Mapping[str, str]) -> dict[str, LongTexts]:
    """Long texts of a block by feature; ``features`` names the feature that each parsed column becomes."""
    long = parsed.long_texts
    if long is None:
        return {}
    by_feature = {}
    for index in np.unique(long.field):
        if (name := features.get(parsed.dialect.fields[index].name)) is None:  # a key of a joined file
            continue
        by_feature[name] = long.take(long.field == index)
    return by_feature


def calendar_keys(seconds: np.ndarray) -> dict[str, np.ndarray]:
    """Keys of the hour of day ("0" to "23") and weekday ("0" is Monday) of (n,) int64 local seconds since 1970."""
    return {
        "hour_of_day": integer_keys(seconds // 3600 % 24),
        "weekday": integer_keys((seconds // 86400 + 3) % 7),  # 1970-01-01 was a Thursday
    }
