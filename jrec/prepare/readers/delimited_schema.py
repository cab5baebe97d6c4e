"""The schema file of ``jrec prepare csv``: which columns a delimited file has and what they become.

See docs/formats.md for every key. TOML and JSON hold the same tables.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

from jrec.data.blocks import LABEL, WEIGHT_SUFFIX
from jrec.data.moments import duration_seconds
from jrec.data.schema import AS_WRITTEN, CANONICAL, MAX_LENGTH, NO_TABLES, DatasetError
from jrec.files import decode, load_toml, parse_json
from jrec.prepare.readers import libsvm, places
from jrec.prepare.readers.dense import STANDARDIZE, TRANSFORMS
from jrec.prepare.readers.log_format import History, TargetMean

_REMEDY = "docs/formats.md has every key"
TOO_LONG = ("error", "first", "last")
TIME_FORMATS = ("integer", "iso", "seconds", "milliseconds", "microseconds", "nanoseconds")
LAYOUTS = ("delimited", "libsvm")
BINARY, NUMBER = LABEL_KINDS = ("binary", "number")
DECIMALS = (".", ",")
ENCODINGS = ("utf-8", "latin-1", "cp1252")
_ENCODING_REMEDY = f"choose one of {', '.join(ENCODINGS)}, or convert the file to UTF-8"
MAX_QUANTILES = 10_000
MAX_FOLDS = 100
PARTS = {"hour": "hour_of_day", "weekday": "weekday"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """The column of the label: 0 and 1, or any number that is a 1 from ``positive_at_least`` on, or texts.

    Of kind "number" it is a finite number to predict as it is, such as a rating, a price or a count.

    Without more said, -1, true and false, yes and no, t and f, y and n in any case are read too. With
    ``positive_values`` these texts are 1, all others 0.
    """

    column: str
    positive_at_least: float | None = None
    positive_values: tuple[str, ...] = ()
    kind: str = BINARY

    @property
    def numeric(self) -> bool:
        """Whether it is a number, and not 0 or 1."""
        return self.kind == NUMBER


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLabelColumn(LabelColumn):
    """One of several labels. ``name`` is its task's, by default the column's.

    A blank, and whatever ``missing_values`` names, is a label that is not known.
    """

    name: str = ""

    @property
    def task(self) -> str:
        """The task's name."""
        return self.name or self.column


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightColumn:
    """The column of how much each example counts, in training and in metrics: finite numbers of at least 0."""

    column: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeColumn:
    """The column by which examples are ordered.

    ``format`` says what it holds: "integer" (of any unit), "iso" (dates and datetimes), numbers, with fractions or
    without, of "seconds", "milliseconds", "microseconds" or "nanoseconds" since 1970, or dates of another pattern, in
    UTC, as strptime has it: "%d.%m.%Y %H:%M".
    """

    column: str
    format: str = "integer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseColumn:
    """A column of numbers. A blank becomes ``missing`` before the transform; without it a blank is an error."""

    column: str
    name: str = ""
    transform: str = "none"
    missing: float | None = None

    @property
    def feature(self) -> str:
        """The feature's name."""
        return self.name or self.column


@dataclasses.dataclass(frozen=True, kw_only=True)
class CategoricalColumn:
    """A column of values, or of lists of values where there is a ``separator`` or ``lists`` is set.

    With ``lists`` and no ``separator`` Parquet files have columns of lists, and texts are lists as JSON or Python
    prints them: ``["a", "b"]``.
    ``weights`` names the column of their weights; lists longer than ``max_length`` are bad lines, or keep their first
    or last values (``too_long``); ``fixed_length`` demands ``max_length`` values everywhere. ``part`` takes the "hour"
    (UTC, "0" to "23") or "weekday" ("0" is Monday) of the column of times.
    ``quantiles`` puts numbers into that many buckets of about as many training values each.
    ``history`` has preparation make the lists of earlier lines; only lines that are predicted have the column, and that
    of their ages, in seconds (of times whose format is "integer" in their unit), if the history names one.
    """

    column: str
    name: str = ""
    table: str = ""
    separator: str = ""
    max_length: int | None = None
    too_long: str = "error"
    fixed_length: bool = False
    weights: str = ""
    lists: bool = False
    part: str = ""
    quantiles: int = 0
    history: History | None = None

    @property
    def feature(self) -> str:
        """The feature's name."""
        return self.name or (f"{self.column}_{self.part}" if self.part else self.column)

    @property
    def many(self) -> bool:
        """Whether the column has lists."""
        return self.lists or bool(self.separator) or self.history is not None

    @property
    def given(self) -> tuple[str, ...]:
        """The columns that only lines to predict have, where the feature is a history: its values, and their ages."""
        return () if self.history is None else tuple(filter(None, (self.column, self.history.ages)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cross:
    """A categorical feature whose values are the combinations of the values of two or more features, ``of``.

    ``min_count`` is its table's own, by default the one for all tables.
    """

    of: tuple[str, ...]
    name: str = ""
    min_count: int | None = None

    @property
    def feature(self) -> str:
        """The feature's name."""
        return self.name or "_".join(self.of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Join:
    """A file with a row for each value of the log's column ``key``, found in its own column ``on`` (default ``key``).

    ``file`` is relative to the schema file, ``name`` (default the file's) what --join calls it. ``delimiter`` and
    ``encoding`` are the log's by default; ``columns`` names the columns of a file without a header.
    """

    file: str
    key: str
    on: str = ""
    name: str = ""
    delimiter: str = ""
    quoting: bool = True
    columns: tuple[str, ...] = ()
    dense: tuple[DenseColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    encoding: str = ""

    @property
    def own_key(self) -> str:
        """The file's column of keys."""
        return self.on or self.key

    @property
    def title(self) -> str:
        """What the file is called."""
        return self.name or pathlib.Path(self.file).name

    @property
    def by_feature(self) -> dict[str, str]:
        """By column of the file, its name in the log: the feature's name, or the name of the feature's weights."""
        named = {d.column: d.feature for d in self.dense} | {c.column: c.feature for c in self.categorical}
        return named | {c.weights: f"{c.feature}{WEIGHT_SUFFIX}" for c in self.categorical if c.weights}

    @property
    def needed(self) -> str:
        """A feature that cannot be missing, so that the file must have every key of the log; "" where there is none."""
        dense = [d.feature for d in self.dense if d.missing is None]
        return next(iter([*dense, *(c.feature for c in self.categorical if c.fixed_length)]), "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelimitedSchema:
    """A whole schema file. ``columns`` names the columns of files without a header; ``label`` may be left out of logs
    that are prepared without labels. ``labels`` are several in its place, one a task. ``missing_values`` are the texts
    that stand for a missing value in dense and categorical columns, and for one of several labels that is not known; a
    blank always does. ``join`` are files whose columns join the log's.

    ``values`` says whether texts of categories are brought into one form (``jrec.data.canonical``), so that
    True and true are one value, and 7.0 and 7 are, or stay as they are written.

    ``cross`` and ``target_mean`` make features of other features' values.

    ``decimal`` is "," where numbers of dense columns, quantiles and labels have a decimal comma. ``layout`` is "libsvm"
    for lines of ``LABEL INDEX:VALUE …``, whose columns are called "label", "features" and "values".
    """

    label: LabelColumn | None = None
    dense: tuple[DenseColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    time: TimeColumn | None = None
    weight: WeightColumn | None = None
    name: str = "csv"
    delimiter: str = ","
    quoting: bool = True
    columns: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = ("",)
    decimal: str = "."
    layout: str = "delimited"
    join: tuple[Join, ...] = ()
    labels: tuple[TaskLabelColumn, ...] = ()
    values: str = CANONICAL
    encoding: str = "utf-8"
    cross: tuple[Cross, ...] = ()
    target_mean: tuple[TargetMean, ...] = ()

    @property
    def all_labels(self) -> tuple[LabelColumn, ...]:
        """The label, or several, or none."""
        return self.labels or ((self.label,) if self.label else ())

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels where there are several."""
        return tuple(label.task for label in self.labels)

    def prejoined(self) -> DelimitedSchema:
        """The schema of the same log with the joined files' columns in it, called as their features."""

        def renamed[T: DenseColumn | CategoricalColumn](columns: tuple[T, ...], by_feature: dict[str, str]) -> list[T]:
            weights = [{"weights": by_feature[w]} if (w := getattr(c, "weights", "")) else {} for c in columns]
            return [
                dataclasses.replace(c, column=c.feature, name=c.feature, **w)
                for c, w in zip(columns, weights, strict=True)
            ]

        return dataclasses.replace(
            self,
            dense=(*self.dense, *(d for j in self.join for d in renamed(j.dense, j.by_feature))),
            categorical=(*self.categorical, *(c for j in self.join for c in renamed(j.categorical, j.by_feature))),
            join=(),
        )

    def side(self, join: Join) -> DelimitedSchema:
        """The schema of a joined file."""
        return DelimitedSchema(
            name=join.title,
            delimiter=join.delimiter or self.delimiter,
            quoting=join.quoting,
            encoding=join.encoding or self.encoding,
            columns=join.columns,
            missing_values=self.missing_values,
            decimal=self.decimal,
            values=self.values,
            dense=join.dense,
            categorical=join.categorical,
        )

    @property
    def histories(self) -> dict[str, History]:
        """The histories by feature."""
        return {c.feature: c.history for c in self.categorical if c.history is not None}

    def table_of(self, feature: CategoricalColumn) -> str:
        """The table of a categorical feature; a history has the table of its items."""
        if feature.history is None:
            return feature.table or feature.feature
        items = (c for part in (self, *self.join) for c in part.categorical if c.feature == feature.history.of)
        return next((c.table or c.feature for c in items), "")

    def used_columns(self) -> list[str]:
        """Every column that features, label, weight and time read, as often as they read it; without joined files."""
        used = [
            *(label.column for label in self.all_labels),
            *(d.column for d in self.dense),
            *(c.column for c in self.categorical if not (c.part or c.history)),
        ]
        used += [c.weights for c in self.categorical if c.weights]
        return used + [part.column for part in (self.weight, self.time) if part]


def load_schema(path: str) -> DelimitedSchema:
    """Reads and checks a schema file.

    Raises:
      DatasetError: Naming the file, the key and what it should be.
    """
    tree = load_toml(path, error=DatasetError) if not path.endswith(".json") else _read_json(path)
    schema = decode(tree, DelimitedSchema, where=f"schema {path}", error=DatasetError, remedy=_REMEDY, partial=True)
    if schema.layout == "libsvm":
        schema = _of_libsvm(schema, path)
    check_schema(schema, path)
    folder = pathlib.Path(path).parent
    joins = (dataclasses.replace(j, file=places.absolute(j.file, folder), name=j.title) for j in schema.join)
    return dataclasses.replace(schema, join=tuple(joins))


def check_schema(schema: DelimitedSchema, path: str) -> None:
    """Refuses a schema whose values do not go together.

    Raises:
      DatasetError: Naming the schema by its path, the key and what it should be.
    """
    _check_joins(schema, path)
    _check(schema.prejoined(), path)


def feature_name(column: str) -> str:
    """A column's name as one that a feature or table can have: files, and columns of weights, are called after them."""
    name = re.sub(r"[/\0]|^\.", "_", column)
    return f"{name}_" if name.endswith(WEIGHT_SUFFIX) else name


def _of_libsvm(schema: DelimitedSchema, path: str) -> DelimitedSchema:
    """The schema with the columns of a libsvm file, as lists."""
    if schema.columns or schema.delimiter != ",":
        raise DatasetError(f"schema {path}: layout = 'libsvm' has its own columns and delimiter; leave them out")
    features = (
        dataclasses.replace(c, separator=libsvm.SEPARATOR) if c.column == libsvm.COLUMNS[1] else c
        for c in schema.categorical
    )
    return dataclasses.replace(
        schema, columns=libsvm.COLUMNS, delimiter=libsvm.DELIMITER, quoting=False, categorical=tuple(features)
    )


def _read_json(path: str) -> Any:
    try:
        return parse_json(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not valid JSON: {error}") from error


def _check_columns(schema: DelimitedSchema, keys: list[str], subject: str) -> None:
    """Checks which columns of one kind of file are read, and as what."""
    used = schema.used_columns()
    if repeated := sorted({c for c in used if used.count(c) > 1}):
        raise DatasetError(
            f"{subject}: column(s) {', '.join(repeated)} are used more than once; a column can become one thing only"
        )
    if repeated := sorted({c for c in schema.columns if schema.columns.count(c) > 1}):
        raise DatasetError(f"{subject}: columns names {', '.join(repeated)} more than once")
    if schema.columns and (lacking := [c for c in dict.fromkeys([*used, *keys]) if c not in schema.columns]):
        raise DatasetError(f"{subject}: column(s) {', '.join(lacking)} are not among columns = {list(schema.columns)}")
    plain = {c.column for c in schema.categorical if not (c.many or c.part or c.quantiles)}
    if other := [key for key in keys if key in used and key not in plain]:
        raise DatasetError(
            f"{subject}: column {other[0]!r} is a key, which is compared as text; it can be a categorical feature of"
            " one value as well, but nothing else"
        )


def _check_joins(schema: DelimitedSchema, path: str) -> None:
    _check_columns(schema, [j.key for j in schema.join], f"schema {path}")
    taken = {*schema.used_columns(), *(j.key for j in schema.join)}
    titles = [j.title for j in schema.join]
    for join in schema.join:
        subject = f"schema {path}: join {join.title!r}"
        if not join.title:
            raise DatasetError(f"schema {path}: file of a [[join]] is {join.file!r}; name the file to join")
        if titles.count(join.title) > 1:
            raise DatasetError(f"{subject} is the name of several; give each [[join]] a name")
        if not (join.dense or join.categorical):
            raise DatasetError(f"{subject} has no feature; add a [[join.dense]] or a [[join.categorical]]")
        if made := [c.feature for c in join.categorical if c.history is not None]:
            raise DatasetError(f"{subject}: {made[0]!r} has a history, which is of the log's lines; put it there")
        if any(mark in join.delimiter for mark in '\n\r"'):
            raise DatasetError(f"{subject}: delimiter is {join.delimiter!r}; it must be without line ends or quotes")
        if join.encoding not in ("", *ENCODINGS):
            raise DatasetError(f"{subject}: encoding is {join.encoding!r}; {_ENCODING_REMEDY}")
        _check_columns(schema.side(join), [join.own_key], subject)
        if both := [name for name in join.by_feature.values() if name in taken]:
            raise DatasetError(
                f"{subject}: feature {both[0]!r} is called as a column of the log; set another name for it"
            )


def _check(schema: DelimitedSchema, path: str) -> None:
    """Checks a schema whose joined files' columns are in the log."""

    def wrong(fault: str) -> DatasetError:
        return DatasetError(f"schema {path}: {fault}")

    marks = [("delimiter", schema.delimiter)] + [("separator", c.separator) for c in schema.categorical if c.separator]
    for subject, mark in marks:
        if not mark or "\n" in mark or "\r" in mark or '"' in mark:
            raise wrong(f"{subject} is {mark!r}; it must be non-empty, without line ends or quotes")
    if schema.labels and schema.label:
        raise wrong("there are [label] and [[labels]]; make the first one a [[labels]], too")
    if len(schema.labels) == 1:
        raise wrong("there is one [[labels]]; a log with one label has a [label] table")
    tasks = [task for k, task in enumerate(schema.tasks) if k or task != LABEL]  # blocks call the first one LABEL
    _check_made(schema, wrong)
    made = [*(cross.feature for cross in schema.cross), *(n for m in schema.target_mean for n in m.features)]
    names = [LABEL, *tasks, *(d.feature for d in schema.dense), *(c.feature for c in schema.categorical), *made]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise wrong(f"feature name(s) {', '.join(repeated)} occur more than once, or are the label's")
    for name in [*names, *(c.table for c in schema.categorical if c.table)]:
        if feature_name(name) != name:
            raise wrong(f"{name!r} cannot name a feature or table: files are called after them; set another name")
    if schema.weight and not schema.all_labels:
        raise wrong("there is a [weight], but no [label], whose loss it is of; add one, or leave [weight] out")
    for label in schema.all_labels:
        where = "[label]" if schema.label else f"[[labels]] of column {label.column!r}"
        if label.kind not in LABEL_KINDS:
            raise wrong(f"kind of label {label.column!r} is {label.kind!r}; choose one of {', '.join(LABEL_KINDS)}")
        if label.numeric and (label.positive_values or label.positive_at_least is not None):
            raise wrong(f"{where} of kind 'number' is no click; leave positive_values and positive_at_least out")
        if label.positive_values and label.positive_at_least is not None:
            raise wrong(f"{where} has positive_values and positive_at_least; give one of them")
    if schema.values not in (CANONICAL, AS_WRITTEN):
        raise wrong(f"values is {schema.values!r}; choose {CANONICAL!r} or {AS_WRITTEN!r}")
    if schema.encoding not in ENCODINGS:
        raise wrong(f"encoding is {schema.encoding!r}; {_ENCODING_REMEDY}")
    if schema.layout not in LAYOUTS:
        raise wrong(f"layout is {schema.layout!r}; choose one of {', '.join(LAYOUTS)}")
    if schema.decimal not in DECIMALS or schema.decimal == schema.delimiter:
        raise wrong(f"decimal is {schema.decimal!r}; it must be '.' or ',', and not the delimiter")
    if schema.time and schema.time.format not in TIME_FORMATS and "%" not in schema.time.format:
        raise wrong(
            f"format of [time] is {schema.time.format!r}; choose one of {', '.join(TIME_FORMATS)}, or a pattern such"
            " as '%d.%m.%Y %H:%M'"
        )
    for dense in schema.dense:
        if dense.transform not in (transforms := [*TRANSFORMS, STANDARDIZE]):
            raise wrong(f"transform of {dense.feature!r} is {dense.transform!r}; choose one of {', '.join(transforms)}")
    _check_histories(schema, wrong)
    for feature in schema.categorical:
        subject = f"categorical {feature.feature!r}"
        if feature.quantiles and not 2 <= feature.quantiles <= MAX_QUANTILES:
            raise wrong(f"{subject}: quantiles is {feature.quantiles}; it must be 2 to {MAX_QUANTILES:,}")
        if feature.quantiles and (feature.many or feature.part):
            raise wrong(f"{subject}: quantiles are of a column of numbers; leave out separator, lists and part")
        if feature.part:
            if feature.part not in PARTS:
                raise wrong(f"{subject}: part is {feature.part!r}; choose one of {', '.join(PARTS)}")
            if schema.time is None or schema.time.column != feature.column or schema.time.format == "integer":
                raise wrong(
                    f"{subject}: part = {feature.part!r} is of the column of [time], whose format must say what it"
                    f" holds, one of {', '.join(TIME_FORMATS[1:])}"
                )
            if feature.many:
                raise wrong(f"{subject}: a part of a time is one value; leave out separator and lists")
        if feature.too_long not in TOO_LONG:
            raise wrong(f"{subject}: too_long is {feature.too_long!r}; choose one of {', '.join(TOO_LONG)}")
        if feature.max_length is not None and feature.max_length < 1:
            raise wrong(f"{subject}: max_length is {feature.max_length}; it must be at least 1")
        listy = [k for k in ("max_length", "fixed_length", "weights") if getattr(feature, k)]
        if not feature.many and listy:
            raise wrong(f"{subject}: {', '.join(listy)} is for lists; give a separator too, or set lists = true")
        if feature.too_long != "error" and feature.max_length is None:
            raise wrong(f"{subject}: too_long = {feature.too_long!r} needs a max_length")
        if feature.fixed_length and feature.max_length is None:
            raise wrong(f"{subject}: fixed_length needs a max_length")
    if not schema.categorical:
        raise wrong(f"there is no [[categorical]] feature, but {NO_TABLES}")


def _check_made(schema: DelimitedSchema, wrong: Callable[[str], DatasetError]) -> None:
    """Checks crosses and target means of a schema whose joined files' columns are in the log."""
    single = [c.feature for c in schema.categorical if not (c.many or c.quantiles)]
    crosses = [cross.feature for cross in schema.cross]
    for kind, one, known, least in (
        *(("cross", cross, single, 2) for cross in schema.cross),
        *(("target_mean", mean, [*single, *crosses], 1) for mean in schema.target_mean),
    ):
        subject = f"[[{kind}]] of {list(one.of)}"
        if unknown := [name for name in one.of if name not in known]:
            raise wrong(
                f"{subject}: {unknown[0]!r} must be a [[categorical]] feature of one value and without quantiles, one"
                f" of {', '.join(known) or 'which there is none'}"
            )
        if len(one.of) < least or len(set(one.of)) < len(one.of):
            raise wrong(f"{subject}: of must name {least} or more features, none of them twice")
        if one.min_count is not None and one.min_count < 1:
            raise wrong(f"{subject}: min_count is {one.min_count}; it must be at least 1")
    tables = {schema.table_of(c) for c in schema.categorical}
    if shared := [name for name in crosses if name in tables]:
        raise wrong(f"[[cross]] {shared[0]!r} is called as a table of other features; set another name for it")
    for mean in schema.target_mean:
        subject = f"[[target_mean]] of {list(mean.of)}"
        if mean.label and mean.label not in schema.tasks:
            known = ", ".join(schema.tasks)
            raise wrong(
                f"{subject}: label is {mean.label!r}; "
                + (f"it must be one of {known}" if known else "leave it out, since the log has one label")
            )
        if not schema.all_labels:
            raise wrong(f"{subject} is of the label, but there is no [label]; add one, or leave the target mean out")
        if not 0 < mean.smoothing < math.inf:
            raise wrong(f"{subject}: smoothing is {mean.smoothing:g}; it must be a number of lines above 0")
        if mean.folds is not None and mean.folds != 0 and not 2 <= mean.folds <= MAX_FOLDS:
            raise wrong(f"{subject}: folds is {mean.folds}; it must be 2 to {MAX_FOLDS}, or 0 for what is earlier")
        if mean.window:
            if mean.folds:
                raise wrong(f"{subject} has window and folds, but lines of a window are earlier ones; leave folds out")
            if schema.time is None or schema.time.format == "integer":
                raise wrong(
                    f"{subject}: window = {mean.window!r} is of the time of lines, but "
                    + ("there is no [time]; add one" if schema.time is None else "[time] has no unit; set its format")
                    + f", one of {', '.join(TIME_FORMATS[1:])}"
                )
            if duration_seconds(mean.window) is None:
                raise wrong(f"{subject}: window is {mean.window!r}; give days, hours, minutes or seconds, such as '7d'")


def _check_histories(schema: DelimitedSchema, wrong: Callable[[str], DatasetError]) -> None:
    """Checks the histories of a schema whose joined files' columns are in the log."""
    taken = [*schema.used_columns(), *schema.columns, *(name for c in schema.categorical for name in c.given)]
    single = {c.feature: c for c in schema.categorical if not (c.many or c.quantiles)}
    for feature in schema.categorical:
        if (history := feature.history) is None:
            continue
        subject = f"categorical {feature.feature!r}: history"
        for key, name in (("by", history.by), ("of", history.of)):
            if name not in single:
                raise wrong(
                    f"{subject} has {key} = {name!r}; it must be a [[categorical]] feature of one value, one of"
                    f" {', '.join(single) or 'which there is none'}"
                )
        for column in feature.given:
            if taken.count(column) > 1:
                raise wrong(
                    f"{subject} is made of earlier lines, but its column {column!r}, which only lines that are"
                    " predicted have, is a column of the log or of another feature; choose another name for it"
                )
        if history.ages and schema.time is None:
            raise wrong(f"{subject} has ages = {history.ages!r}, but there is no [time], of which they are; add one")
        if not 1 <= history.length <= MAX_LENGTH:
            raise wrong(f"{subject} has length {history.length:,}; it must be 1 to {MAX_LENGTH:,}")
        own = ("max_length", "fixed_length", "weights", "part", "quantiles")
        if stated := [key for key in own if getattr(feature, key)]:
            raise wrong(f"{subject} says what the lists are; leave out {', '.join(stated)}")
        if feature.too_long != "error":
            raise wrong(f"{subject} keeps the last {history.length:,} values; leave out too_long")
        if feature.table not in ("", table := schema.table_of(feature)):
            raise wrong(
                f"{subject} is of {history.of!r}, which has table {table!r}, but table is {feature.table!r}; leave it"
                " out"
            )
