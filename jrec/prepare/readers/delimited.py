"""Delimited text of any columns, as a schema file describes it: the format ``csv``."""

from __future__ import annotations

import copy
import csv
import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self, override

import numpy as np

from jrec.data.blocks import EXAMPLE_WEIGHT
from jrec.data.columns import ListColumn, lists_at
from jrec.data.keys import MISSING, crossed_keys
from jrec.data.schema import AS_WRITTEN, CANONICAL, UNKNOWN, DatasetError, DenseFeature
from jrec.data.spans import NO_TIME
from jrec.errors import JrecError
from jrec.files import decode
from jrec.json_values import JsonObject
from jrec.prepare.readers import libsvm
from jrec.prepare.readers.columnar import check_type
from jrec.prepare.readers.delimited_schema import (
    BINARY,
    PARTS,
    CategoricalColumn,
    DelimitedSchema,
    DenseColumn,
    Join,
    LabelColumn,
)
from jrec.prepare.readers.dense import STANDARDIZE, bucket_keys, dense_column, reject_dense
from jrec.prepare.readers.lines import first_line, refuse_json
from jrec.prepare.readers.log_format import (
    CategoricalSpec,
    Chunk,
    History,
    LogFormat,
    calendar_keys,
    one_hot,
    texts_by_feature,
)
from jrec.prepare.readers.parse import Dialect, Field, Kind, ParsedBlock, any_of_list
from jrec.prepare.readers.tables import column_types, is_table

_MISSING_HINT = "; if it stands for a missing value, add it to missing_values in the schema"
_INTEGER_HINT = '; for dates set format = "iso" in [time], for fractions format = "seconds"'
_TEXT_HINT = '; if the file is in Latin-1, set encoding = "latin-1" (of Windows "cp1252") in the schema'
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Delimited(LogFormat):
    """Columns by name: from the header of each file, or from the schema where files have none.

    Args:
      schema: The columns of features, label and time.
      keys: Columns that are read as texts, whether they are features or not.
    """

    def __init__(self, schema: DelimitedSchema, keys: Sequence[str] = ()):
        self._schema = schema
        self._keys = tuple(keys)
        self._limits: dict[str, int] = {}
        self._zero, self._minus = set[str](), set[str]()  # columns of labels that were assembled with a 0, or a -1
        self.name = schema.name
        self._labels = schema.all_labels
        self.label = self._labels[0].column if self._labels else ""
        self.tasks, self.task_fields = schema.tasks, tuple(label.column for label in schema.labels)
        names = schema.tasks or ("",)
        numeric = zip(names, self._labels, strict=False)
        self.numeric_labels = frozenset(name for name, label in numeric if label.numeric)
        self.weighted, self._weight = schema.weight is not None, schema.weight.column if schema.weight else ""
        self._predicted = False
        self.complete = frozenset(d.feature for d in schema.dense if d.missing is None)
        self.timed = schema.time is not None
        self.target_means = schema.target_mean
        means = (DenseFeature(name=name, transform=STANDARDIZE) for m in schema.target_mean for name in m.features)
        self.dense = (*(DenseFeature(name=d.feature, transform=d.transform) for d in schema.dense), *means)
        self.categorical = tuple(_spec(c, schema.table_of(c)) for c in schema.categorical) + _of_crosses(schema)
        self.histories = schema.histories
        self.steps = _steps(self.histories)
        self.ticks = 1 if schema.time is None or schema.time.format == "integer" else 1_000_000

    @property
    @override
    def dated(self) -> bool:
        return self._schema.time is not None and self._schema.time.format != "integer"

    def limited(self, lengths: Mapping[str, int]) -> Delimited:
        """Bounds lists whose longest the log would decide."""
        limited = copy.copy(self)
        open_lists = [c.feature for c in self._schema.categorical if c.many and not (c.max_length or c.history)]
        limited._limits = {name: lengths[name] for name in open_lists if name in lengths}
        return limited

    def fitted(self, dense: Mapping[str, DenseFeature], boundaries: Mapping[str, tuple[float, ...]]) -> Delimited:
        """Standardizes by these means and deviations, and puts numbers into these buckets."""
        known = copy.copy(self)
        known.dense = tuple(dense.get(f.name, f) for f in self.dense)
        known.categorical = tuple(
            dataclasses.replace(s, boundaries=boundaries.get(s.name)) if s.quantiles else s for s in self.categorical
        )
        return known

    def predicted(self) -> Self:
        """Takes the missing numbers that were learnt, and times and lists of a fixed length that are missing."""
        other = copy.copy(self)
        other._predicted, other._schema = True, with_given_histories(self._schema)
        return other

    def _missing_of(self, feature: DenseFeature, stated: float | None) -> float | None:
        """What a missing value of a dense feature stands for; None where it is an error."""
        return feature.missing if stated is None and self._predicted else stated

    def options(self) -> JsonObject:
        """The whole schema, in the types of JSON, and which features are histories of the same lines."""
        return self._stored(self._schema)

    def _stored(self, schema: DelimitedSchema) -> JsonObject:
        return {"schema": stored_schema(schema)} | ({"steps": [*map(list, self.steps)]} if self.steps else {})

    def dialect(self, path: str) -> Dialect:
        """Reads the header, unless the schema names the columns."""
        schema = self._schema
        if not self._labels and self.labels == "required":
            raise DatasetError("the schema has no [label]; add one, or pass --no-labels for a log without labels")
        if is_table(path):
            types = column_types(path)
            self._check_columns(f"{path}: the file", list(types))
            names = [name for name in types if name in self._read_columns]
            fields = tuple(self._field(name) for name in names)
            for field in fields:
                check_type(path, field, types[field.name])
            return Dialect(fields=fields, table=True, missing_hint=_MISSING_HINT, integer_hint=_INTEGER_HINT)
        names = list(schema.columns)
        labels = [label.column for label in self._labels if label.column in names]
        # Files without a header may lack the labels, or the labels and the weight: their number of fields says so.
        weighted = [self._weight] if self._weight in names else []
        # A file to predict has the columns of training, or those without what only training knows.
        for absent in (labels, [*labels, *weighted]):
            if self.labels != "required" and absent and len(self._split(path)) == len(names) - len(absent):
                names = [name for name in names if name not in absent]
                break
        if not names:
            refuse_json(path)
            names = self._split(path)
            remedy = ". If the file has no header, name its columns in the schema (columns = [...])"
            if self._predicted:  # by the schema of the training data
                remedy = ". Give a header with every column that the training data's features are made of"
            self._check_columns(f"{path}:1: the header", names, remedy)
            if repeated := sorted({n for n in names if names.count(n) > 1}):
                raise DatasetError(f"{path}:1: the header has column(s) {', '.join(repeated)} more than once")
        return Dialect(
            fields=tuple(self._field(name) for name in names),
            delimiter=schema.delimiter,
            quoting=schema.quoting,
            skip_lines=0 if schema.columns else 1,
            libsvm=schema.layout == "libsvm",
            hint=libsvm.HINT if schema.layout == "libsvm" else "",
            missing_hint=_MISSING_HINT,
            integer_hint=_INTEGER_HINT,
            text_hint=_TEXT_HINT if schema.encoding == "utf-8" else "",
            encoding=schema.encoding,
        )

    def _check_columns(self, subject: str, names: list[str], remedy: str = "") -> None:
        for feature in self._schema.categorical:
            if made := [column for column in feature.given if column in names]:
                raise DatasetError(
                    f"{subject} has column {made[0]!r}, but the schema makes {feature.feature!r} of earlier lines;"
                    " leave out history in the schema to read the column, or give the feature another column"
                )
        labels = [label.column for label in self._labels]
        optional = set(labels) if self.labels != "required" else set()
        if self.labels != "required":
            optional.add(self._weight)
        if self._schema.time and self._predicted and not self._parts:
            optional.add(self._schema.time.column)
        if lacking := [c for c in self._read_columns if c not in names and c not in optional]:
            held = ", ".join(names)[:200]
            hint = "; a log without labels needs --no-labels" if lacking == labels else ""
            made = (c for c in self._schema.categorical if c.feature in self.histories)
            if (history := next((c for c in made if c.column in lacking or c.weights in lacking), None)) is not None:
                ages = f" in {history.column!r}, and in {history.weights!r} how many seconds ago each was"
                hint = (
                    f"; {history.feature!r} is a history: give each line the user's items, oldest first, or a blank"
                    f" for none{ages if history.weights else ''}; or prepare a log that has the users' earlier lines,"
                    " too, with --vocabulary-from the training data, which makes histories, and predict that dataset"
                )
            raise DatasetError(f"{subject} lacks column(s) {', '.join(lacking)}; it has {held}{remedy}{hint}")

    def _split(self, path: str) -> list[str]:
        """The fields of a file's first line."""
        schema = self._schema
        line = first_line(path).decode(schema.encoding, errors="replace").removeprefix("\ufeff")
        if not schema.quoting or '"' not in line:
            return line.split(schema.delimiter)
        if len(schema.delimiter) == 1:
            return next(csv.reader([line], delimiter=schema.delimiter), [])
        raise DatasetError(f"{path}:1: a quoted header needs a delimiter of one character")

    def raw_fields(self) -> tuple[Field, ...]:
        """Every column that features are made of."""
        time = self._schema.time.column if self._schema.time and not self._parts else ""
        not_features = {time, self._weight, *(label.column for label in self._labels)}
        return tuple(self._field(name) for name in self._schema.used_columns() if name not in not_features)

    def _field(self, name: str) -> Field:
        schema = self._schema
        kind: Kind = "skip"
        blank, separator, missing = True, "|", ()
        if (label := next((label for label in self._labels if label.column == name), None)) is not None:
            if self.labels == "none":
                return Field(name=name, kind="skip")
            kind = "number" if label.numeric or label.positive_at_least is not None else "label"
            several = bool(self.tasks)
            absent = self._missing if several else ()
            positive = label.positive_values
            return Field(
                name=name, kind=kind, blank=several, positive=positive, missing=absent, decimal=schema.decimal,
                canonical=schema.values == CANONICAL,
            )  # fmt: skip
        if name == self._weight:
            return Field(name=name, kind="number" if self.weighted else "skip", blank=False, decimal=schema.decimal)
        if schema.time and name == schema.time.column:
            if self._predicted and not self._parts:
                return Field(name=name, kind="skip")
            kind = "integer" if schema.time.format == "integer" else "time"
            absent = self._missing if self._predicted else ()
            return Field(name=name, kind=kind, blank=self._predicted, unit=schema.time.format, missing=absent)
        for dense, feature in self._dense_columns:
            if name == dense.column:
                blank = self._missing_of(feature, dense.missing) is not None
                kind, missing = "number", self._missing
        for feature in schema.categorical:
            if name == feature.column and not (feature.part or feature.history):
                missing = self._missing
                if feature.quantiles:
                    kind = "number"
                    continue
                kind, separator = ("texts" if feature.many else "text"), feature.separator
            elif feature.weights and name == feature.weights:
                kind, separator = "weights", feature.separator
        if name in self._keys:
            kind, missing = "text", self._missing
        return Field(
            name=name, kind=kind, blank=blank, separator=separator, missing=missing, decimal=schema.decimal,
            canonical=schema.values == CANONICAL,
        )  # fmt: skip

    @property
    def _read_columns(self) -> list[str]:
        return list(dict.fromkeys([*self._schema.used_columns(), *self._keys]))

    @property
    def _dense_columns(self) -> list[tuple[DenseColumn, DenseFeature]]:
        """The columns of numbers with their features, which target means follow."""
        return list(zip(self._schema.dense, self.dense, strict=False))

    @property
    def _missing(self) -> tuple[str, ...]:
        return tuple(text for text in self._schema.missing_values if text)

    @property
    def _boundaries(self) -> dict[str, tuple[float, ...]]:
        return {s.name: s.boundaries for s in self.categorical if s.boundaries is not None}

    @property
    def _parts(self) -> list[CategoricalColumn]:
        return [c for c in self._schema.categorical if c.part]

    def check(self, parsed: ParsedBlock) -> None:
        """Rejects rows whose values cannot be what the schema says."""
        for label in self._labels:
            if label.numeric and label.column in parsed.columns:
                values = parsed.numbers(label.column)
                wrong = ~(np.abs(values) <= _FLOAT32_MAX)
                if self.tasks:  # where a blank is a label that is not known
                    wrong &= ~np.isnan(values)
                parsed.reject(wrong, label.column, "is no finite number that float32 holds")
        if self.weighted and self._weight in parsed.columns:
            weights = parsed.numbers(self._weight)
            wrong = ~((weights >= 0) & (weights <= _FLOAT32_MAX))
            parsed.reject(wrong, self._weight, "is no weight, a finite number of at least 0")
        for dense in self._schema.dense:
            reject_dense(parsed, dense.column, dense.transform)
        for feature in self._schema.categorical:
            if feature.many and not feature.history:
                _reject_lists(parsed, feature, may_be_missing=self._predicted)
                if (limit := self._limits.get(feature.feature)) is not None:
                    _reject_longer(parsed, feature.column, limit)

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Labels, dense values, keys, weights and times."""
        schema = self._schema
        self._keep_in_step(parsed)
        self.check(parsed)
        keys, weights, times = {}, {}, None
        if schema.time and schema.time.column in parsed.columns:
            times = parsed.numbers(schema.time.column)
        for feature in schema.categorical:
            if feature.history:  # which preparation makes of all lines
                continue
            if feature.part:
                assert times is not None  # the schema has checked it, and raw_fields names the column
                # Floored, so that hours before 1970 are right, too.
                parts = calendar_keys(times // 1_000_000)[PARTS[feature.part]]
                keys[feature.feature] = np.where(times == NO_TIME, MISSING, parts)
                continue
            if not feature.many:
                keys[feature.feature] = values = parsed.numbers(feature.column)
                if feature.quantiles and (bounds := self._boundaries.get(feature.feature)) is not None:
                    keys[feature.feature] = bucket_keys(bounds, values)
                continue
            keys[feature.feature] = _cut(parsed.lists(feature.column), feature)
            if feature.weights:
                read = _cut(parsed.lists(feature.weights), feature)
                weights[feature.feature] = ListColumn(read.offsets, read.values.astype(np.float32))
        for cross in schema.cross:
            keys[cross.feature] = crossed_keys([keys[name] for name in cross.of])
        read = self._labels if self.labels != "none" else ()
        labels = [self._labels_of(parsed, label) for label in read] or [np.zeros(parsed.rows, np.float32)]
        beside = dict(zip(self.tasks[1:], labels[1:], strict=True))
        if self.weighted:
            stated = self._weight in parsed.columns
            beside[EXAMPLE_WEIGHT] = parsed.numbers(self._weight) if stated else np.ones(parsed.rows)
        return Chunk(
            labels=labels[0],
            tasks={name: values.astype(np.float32) for name, values in beside.items()},
            dense={
                feature.name: dense_column(parsed, d.column, feature, self._missing_of(feature, d.missing))
                for d, feature in self._dense_columns
            },
            keys=keys,
            weights=weights,
            times=times,
            texts=texts_by_feature(parsed, {c.column: c.feature for c in schema.categorical if not c.part}),
        )

    def _keep_in_step(self, parsed: ParsedBlock) -> None:
        """Gives columns that are histories of the same lines as many values; rejects rows where that cannot be."""
        columns = {c.feature: c.column for c in self._schema.categorical if c.history is None}
        for group in self.steps:
            names = [columns[name] for name in group if name in columns]
            sizes = {name: np.diff(parsed.lists(name).offsets) for name in names}
            for name, size in sizes.items():
                # A list of one blank is read as the empty one; beside others of one value it is that blank.
                alone = (size == 0) & np.any([other == 1 for other in sizes.values()], axis=0)
                if alone.any():
                    lists = parsed.lists(name)
                    values = np.insert(lists.values, lists.offsets[:-1][alone], MISSING)
                    parsed.columns[name] = ListColumn(lists.offsets + np.cumsum([0, *alone]), values)
            for first, second in itertools.pairwise(names):
                unlike = np.diff(parsed.lists(first).offsets) != np.diff(parsed.lists(second).offsets)
                parsed.reject(
                    unlike, second, f"has not as many values as {first!r}: both are of the same earlier lines, so give"
                    " a blank (of a list null) for each value that is missing",
                )  # fmt: skip

    def _labels_of(self, parsed: ParsedBlock, label: LabelColumn) -> np.ndarray:
        """(rows,) float32 in {-1, 0, 1}, or numbers; of several NaN is not known, as where the file lacks one."""
        if label.column not in parsed.columns:
            return np.full(parsed.rows, np.nan if self.tasks else 0, np.float32)
        values = parsed.numbers(label.column)
        if label.positive_at_least is not None:
            values = np.where(np.isnan(values), np.nan, values >= label.positive_at_least)
        return values.astype(np.float32)

    def assemble(self, converted: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks, in whose labels of 0 and 1 -1 is 0, and of several -1 is one that is not known.

        Raises:
          DatasetError: If the log has both, since -1 may then stand for something else.
        """
        # Anew for each log: a format may assemble several, as the files of each split.
        self._zero, self._minus = set(), set()
        for chunk in converted:
            labels = self._assembled(0, chunk.labels)
            tasks = {name: self._assembled(k, chunk.tasks[name]) for k, name in enumerate(self.tasks[1:], 1)}
            self.check_parts([self])
            yield dataclasses.replace(chunk, labels=labels, tasks={**chunk.tasks, **tasks})

    def _assembled(self, number: int, labels: np.ndarray) -> np.ndarray:
        column = self._labels[number].column if self._labels else ""
        if self._labels and self._labels[number].numeric:
            return labels
        if (labels == 0).any():
            self._zero.add(column)
        if (labels < 0).any():
            self._minus.add(column)
            # Which of 0 and -1 negatives are is known at the end only: until then both are 0, and seen apart.
            labels = np.maximum(labels, 0)
        return np.where(np.isnan(labels), np.float32(UNKNOWN), labels) if self.tasks else labels

    @property
    def _section(self) -> str:
        return "[[labels]]" if self.tasks else "[label]"

    @property
    def divisible(self) -> bool:
        """Every line stands for itself, but for what -1 means."""
        return True

    def check_parts(self, parts: Sequence[Self]) -> None:
        """Raises a DatasetError if labels are both 0 and -1."""
        zero, minus = (set().union(*sets) for sets in ([p._zero for p in parts], [p._minus for p in parts]))
        if both := sorted(zero & minus):
            raise DatasetError(
                f"column {both[0]!r} holds both 0 and -1 (or words for 0), so that jrec cannot tell what -1 is;"
                f' say which values are positive, such as positive_values = ["1"] in {self._section}'
            )


def _steps(histories: Mapping[str, History]) -> tuple[tuple[str, ...], ...]:
    """Features that are histories of the same lines: of one user and length."""
    groups: dict[tuple[str, int], tuple[str, ...]] = {}
    for name, history in histories.items():
        key = history.by, history.length
        groups[key] = (*groups.get(key, ()), name)
    return tuple(group for group in groups.values() if len(group) > 1)


def with_given_histories(schema: DelimitedSchema) -> DelimitedSchema:
    """The schema of lines that have their histories as columns of lists, the last ones of files without a header."""
    categorical = [
        dataclasses.replace(
            c,
            table=schema.table_of(c),
            lists=True,
            max_length=c.history.length,
            too_long="last",
            weights=c.history.ages,
            history=None,
        )
        if c.history
        else c
        for c in schema.categorical
    ]
    made = tuple(name for c in schema.categorical for name in c.given)
    columns = schema.columns + made if schema.columns else ()
    return dataclasses.replace(schema, categorical=tuple(categorical), columns=columns)


def schema_of_features(schema: DelimitedSchema, names: Collection[str]) -> DelimitedSchema:
    """The schema of lines that are predicted and have only the columns of some features, histories among them."""

    def kept[T: DenseColumn | CategoricalColumn](columns: Iterable[T]) -> tuple[T, ...]:
        return tuple(column for column in columns if column.feature in names)

    def narrowed[S: DelimitedSchema | Join](part: S) -> S:
        return dataclasses.replace(part, dense=kept(part.dense), categorical=kept(part.categorical))

    means = tuple(mean for mean in schema.target_mean if any(name in names for name in mean.features))
    names = {*names, *(name for mean in means for name in mean.of)}
    crosses = tuple(cross for cross in schema.cross if cross.feature in names)
    names = {*names, *(name for cross in crosses for name in cross.of)}
    joins = [join for join in map(narrowed, schema.join) if join.dense or join.categorical]
    narrow = narrowed(with_given_histories(schema))
    return dataclasses.replace(narrow, join=tuple(joins), cross=crosses, target_mean=means)


def read_stored(stored: object, *, where: str, error: Callable[[str], JrecError]) -> DelimitedSchema:
    """A schema that ``stored_schema`` made; older ones, without a choice, have values as they were written.

    Args:
      stored: The schema in the types of JSON.
      where: Its place, for messages.
      error: The error to raise if it is none.
    """
    known = {"values": AS_WRITTEN, **stored} if isinstance(stored, Mapping) else stored
    return decode(known, DelimitedSchema, where=where, error=error, remedy="prepare the dataset again", partial=True)


def stored_schema(schema: DelimitedSchema) -> JsonObject:
    """The whole schema, in the types of JSON; without what older ones had not, where it says nothing."""
    stored = json.loads(json.dumps(dataclasses.asdict(schema)))
    for label in (*stored["labels"], *filter(None, [stored["label"]])):
        if label["kind"] == BINARY:
            del label["kind"]
    for part in (stored, *stored["join"]):
        for column in part["categorical"]:
            if column["history"] is None:
                del column["history"]
            elif not column["history"]["ages"]:
                del column["history"]["ages"]
        if part["encoding"] in ("", "utf-8"):
            del part["encoding"]
    return {k: v for k, v in stored.items() if v or k not in ("join", "labels", "cross", "target_mean", "weight")}


def _of_crosses(schema: DelimitedSchema) -> tuple[CategoricalSpec, ...]:
    names = [cross.feature for cross in schema.cross]
    specs = zip(one_hot(*names), schema.cross, strict=True)
    return tuple(dataclasses.replace(spec, min_count=cross.min_count) for spec, cross in specs)


def _spec(column: CategoricalColumn, table: str) -> CategoricalSpec:
    many = column.many
    return CategoricalSpec(
        name=column.feature,
        table=table,
        many=many,
        weighted=bool(column.weights or (column.history and column.history.ages)),
        aged=bool(column.history and column.history.ages),
        max_length=column.history.length if column.history else column.max_length if many else 1,
        fixed_length=column.fixed_length if many else True,
        quantiles=column.quantiles,
    )


def _reject_lists(parsed: ParsedBlock, feature: CategoricalColumn, *, may_be_missing: bool) -> None:
    """Rejects rows whose list is of a wrong length or whose weights do not fit.

    ``may_be_missing`` says whether a list of a fixed length may be empty.
    """

    def lengths(name: str) -> np.ndarray:
        return np.diff(parsed.lists(name).offsets)

    if feature.weights:
        wrong = lengths(feature.weights) != lengths(feature.column)
        parsed.reject(wrong, feature.weights, f"is not one weight for each value of {feature.column!r}")
        read = parsed.lists(feature.weights)
        wrong = any_of_list(read.offsets, np.abs(read.values) > _FLOAT32_MAX)
        parsed.reject(wrong, feature.weights, "has a weight too large for float32")
    if feature.max_length is not None and feature.too_long == "error":
        wrong = lengths(feature.column) > feature.max_length
        parsed.reject(wrong, feature.column, f"has more than max_length = {feature.max_length} values")
    if feature.fixed_length:
        counts = lengths(feature.column)
        wrong = (counts < (feature.max_length or 0)) & ((counts > 0) | (not may_be_missing))
        parsed.reject(wrong, feature.column, f"has fewer than {feature.max_length} values, but fixed_length is set")


def _reject_longer(parsed: ParsedBlock, column: str, limit: int) -> None:
    """Rejects rows whose list is longer than any of the dataset whose vocabulary is used."""
    wrong = np.diff(parsed.lists(column).offsets) > limit
    parsed.reject(
        wrong, column, f"has more than {limit} values, the most that the dataset with the vocabulary has; to cut such"
        f' lists, set max_length = {limit} and too_long = "last" (or "first") in the schema',
    )  # fmt: skip


def _cut(lists: ListColumn, feature: CategoricalColumn) -> ListColumn:
    """Keeps the first or last ``max_length`` values of each list."""
    if feature.max_length is None or feature.too_long == "error":
        return lists
    lengths = np.diff(lists.offsets)
    kept = np.minimum(lengths, feature.max_length)
    starts = lists.offsets[:-1] + (lengths - kept if feature.too_long == "last" else 0)
    return lists_at(lists.values, starts, kept)
