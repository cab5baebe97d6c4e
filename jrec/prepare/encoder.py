"""Raw values to rows by a prepared dataset's vocabulary, without preparing a dataset: for predictions.

    encoder = Encoder(Schema.load("data/clicks", check_files=False))
    encoded = encoder.columns({"user": ["u17"], "item": ["i2"], "price": [3.5]})

This module imports no JAX. ``jrec.data.dataset_packer.pack_encoded`` makes batches of what is encoded.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jrec.data.bijection import load_order
from jrec.data.blocks import EXAMPLE_WEIGHT, WEIGHT_SUFFIX
from jrec.data.column_forms import by_name
from jrec.data.columns import Column, ListColumn, lists_at
from jrec.data.encoded_columns import EncodedColumns, of_size
from jrec.data.keys import MISSING
from jrec.data.schema import KEEP_LAST, LISTS, CategoricalFeature, DatasetError, Schema
from jrec.data.unknown import UnknownValues
from jrec.data.vocabulary_file import load_table
from jrec.prepare.ingest import BadLines, Log
from jrec.prepare.joined import csv_source
from jrec.prepare.raw_columns import keys_of_lists, parsed_columns
from jrec.prepare.readers.avazu import Avazu
from jrec.prepare.readers.criteo import Criteo
from jrec.prepare.readers.delimited import read_stored
from jrec.prepare.readers.delimited_schema import check_schema
from jrec.prepare.readers.dense import dense_column, reject_dense
from jrec.prepare.readers.lines import check_inputs
from jrec.prepare.readers.log_format import CategoricalSpec, Chunk, LogFormat, learned_of, steps_of
from jrec.prepare.readers.parse import Dialect, Field, Kind, ParsedBlock
from jrec.prepare.readers.streams import Input, InputLike, is_stream, read_names, spool
from jrec.prepare.readers.taobao import Taobao
from jrec.prepare.target_means import LabelCounts, values_by_keys

_THREADS = 2
_REMEDY = "prepare the dataset again"


class Encoder:
    """Gives raw values the rows that they have in a prepared dataset.

    Args:
      schema: The dataset's schema, read from its folder, in which only ``schema.json``, ``vocabulary/``, ``buckets/``,
        ``means/`` and ``reorder/`` need to be (``Schema.load(folder, check_files=False)``).
      growing: By table that grows, a function from (n,) uint64 keys to (n,) rows; keys of others stay keys.

    Values without a row go to their table's OOV row, or to their hash bucket. Tables are read when they are first used.

    Raises:
      DatasetError: If the schema was not read from a folder.
    """

    def __init__(self, schema: Schema, *, growing: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None):
        if schema.folder is None:
            raise DatasetError("the schema was not read from a folder, so that there is no vocabulary; use Schema.load")
        self.schema = schema
        self._folder: pathlib.Path = schema.folder
        self._key_seed = schema.key_seed
        self._log = _log_source(schema)
        self._columns: LogFormat = _FeatureColumns(schema)
        if self._log is not None and self._log.has_fields:
            self._columns = self._log.prejoined()
        self._fields = self._columns.raw_fields()
        self._encoders = dict(growing or {})
        self._counts: dict[str, LabelCounts] = {}

    def with_growing(self, growing: Mapping[str, Callable[[np.ndarray], np.ndarray]]) -> Encoder:
        """The same with other rows of tables that grow; the vocabularies that were read are shared."""
        other = copy.copy(self)
        other._encoders = {**self._encoders, **growing}
        return other

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The names of the columns that ``columns`` needs."""
        return tuple(field.name for field in self._fields)

    @property
    def column_kinds(self) -> dict[str, Kind]:
        """What each of the ``raw_columns`` holds: "text" is one category, "texts" a list of them, and so on."""
        return {field.name: field.kind for field in self._fields}

    @property
    def streams(self) -> bool:
        """Whether ``stream`` takes a log of the dataset's format, whose lines then make examples."""
        return self._log is not None

    @functools.cached_property
    def orders(self) -> dict[str, np.ndarray]:
        """By table that was reordered (``jrec reorder``), (rows,) uint32: the model's row of every stored one."""
        orders = {table.name: load_order(self._folder, table) for table in self.schema.tables}
        return {name: order for name, order in orders.items() if order is not None}

    def load_tables(self) -> None:
        """Reads every table's vocabulary now, which its first use would read."""
        for feature in self.schema.categorical:
            self._encoder(feature.table)
        for file in self.schema.statistic_files:
            self._label_counts(file)
        _ = self.orders

    def columns(self, columns: object, *, unknown: UnknownValues | None = None) -> EncodedColumns:
        """Encodes columns of raw values.

        Args:
          columns: A mapping by column name, an Arrow table, or a DataFrame of at least ``raw_columns``: the columns of
            the log that the dataset was prepared from, or of its features where its format makes an example of
            several lines (sequences, drawn negatives). The columns of files that join a csv log are called as their
            features, and need no files. Each is an (examples,) array or list of numbers or texts; lists of values are
            ragged, or texts with the log's separator. Missing is null, None, NaN or "". Anything but a weight may be
            missing: a number is then what the schema's ``missing`` says, or else what becomes the mean of the
            transformed values in training; a value is then the missing one, ""; and a list of a fixed length has only
            missing values.
          unknown: Counts the values that training did not see.

        Returns:
          The examples, without labels.

        Raises:
          DatasetError: If a column is missing, or a value is none that a log may have; names column, example and value.
          ValueError: If a column has no such form, or columns are of unequal lengths.

        Example:
          >>> encoder = jrec.data.Encoder(jrec.data.Schema.load("data", check_files=False))
          >>> encoded = encoder.columns({"user": ["u17", None], "item": ["i2", "i6"]})
          >>> encoded.ids["user"].shape
          (2,)
        """
        parsed = parsed_columns(self._fields, columns, self._key_seed)
        return self._encoded(self._columns.convert(parsed), unknown)

    def named_rows(
        self, columns: object, name: str, table: str, *, unknown: UnknownValues | None = None
    ) -> ListColumn | None:
        """The model's rows of lists of a table's values, in a column that is no feature's.

        Args:
          columns: As of ``columns``, of which one holds by example a list of values as the log has them; null is an
            empty list.
          name: Its name, also in ``unknown``.
          table: The table.
          unknown: Counts the values that training did not see.

        Returns:
          int64 rows, of unknown values the row that these have; None where there is no such column.

        Raises:
          DatasetError: If the column has no lists, or a value is none that the log may have.
          ValueError: If the column has no such form.
        """
        if name in self.raw_columns or (column := by_name(columns).get(name)) is None:
            return None
        kind: Kind = "hex" if "hex" in self.column_kinds.values() else "text"
        field = Field(name=name, kind=kind, canonical=self.schema.canonical)
        keys, described = keys_of_lists(field, column, self._key_seed), self.schema.table(table)
        stored, order = self._encoder(table)(keys.values), self.orders.get(table)
        if unknown is not None and described.oov_row is not None:
            unknown.add_values(name, keys.values, stored != described.oov_row, trained=described.oov_share)
        return ListColumn(keys.offsets, (stored if order is None else order[stored]).astype(np.int64))

    def blank(self) -> EncodedColumns:
        """One example of which nothing is known: numbers and values are missing, lists are empty.

        Raises:
          DatasetError: If a table has no vocabulary, or a number of the features may not be missing; names it.
        """
        self.load_tables()  # so that what lacks a vocabulary says so, and not that its numbers may not be missing
        if all(field.blank for field in self._fields) or self.schema.dense:
            columns = {name: [[]] if kind == "weights" else [None] for name, kind in self.column_kinds.items()}
            return self.columns(columns)
        # A column that may not be missing, as a time, makes features that may be: whatever it is, they are missing.
        return self._encoded(self._unknown_values(1), None)

    def _unknown_values(self, rows: int) -> Chunk:
        """Lines with missing values and empty lists, and zeros for numbers and labels."""
        offsets, nothing = np.zeros(rows + 1, np.int64), np.zeros(rows, np.float32)
        empty = ListColumn(offsets, np.zeros(0, np.uint64))
        keys = {f.name: np.full(rows, MISSING) if f.one_hot else empty for f in self.schema.categorical}
        weighted = [f.name for f in self.schema.categorical if f.weighted]
        return Chunk(
            labels=nothing,
            tasks=dict.fromkeys([*self.schema.tasks[1:], *([EXAMPLE_WEIGHT] if self.schema.weighted else [])], nothing),
            dense=dict.fromkeys((f.name for f in self.schema.dense), nothing),
            keys=keys,
            weights={name: ListColumn(offsets, np.zeros(0, np.float64)) for name in weighted},
        )

    def dialect(self, path: str) -> Dialect:
        """How the lines of a text file of the log that the dataset was prepared from split."""
        assert self._log is not None, "a format whose files ``stream`` reads"
        return self._log.dialect(path)

    def stream(
        self,
        inputs: InputLike | Sequence[InputLike],
        *,
        batch_size: int,
        threads: int = _THREADS,
        joined: Mapping[str, str] | None = None,
        report: Callable[[str], None] | None = None,
        unknown: UnknownValues | None = None,
    ) -> Iterator[EncodedColumns]:
        """Encodes a raw log of the dataset's format, in the order of its lines and in bounded memory.

        Args:
          inputs: Inputs in any form that ``prepare`` takes. A pipe or a table is copied to a temporary file first.
          batch_size: Examples in each piece but the last.
          threads: Threads that parse.
          joined: The paths of files that join the log, by their name in the schema; those that are not given are read
            where they were when the dataset was prepared.
          report: Takes messages for the user, such as how many examples have a key that a joined file lacks.
          unknown: Counts the values that training did not see.

        Yields:
          The examples, with labels where all files have them; lines may lack them where the format allows it. One
          piece without examples where there is no line.

        Raises:
          DatasetError: If the format makes examples of several lines, an input cannot be read, or a line is malformed.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if self._log is None:
            raise DatasetError(
                f"{self.schema.name!r} was prepared from a format that makes examples of several lines or files;"
                " prepare the log with --vocabulary-from, and predict that dataset"
            )
        paths = read_names(inputs)
        check_inputs(paths, keep_order=True)
        source = self._log.with_joined(joined or {})
        source.joined_inputs()
        return self._stream(source, paths, batch_size, threads, report, unknown)

    def _stream(
        self,
        source: LogFormat,
        paths: list[str],
        batch_size: int,
        threads: int,
        report: Callable[[str], None] | None,
        unknown: UnknownValues | None,
    ) -> Iterator[EncodedColumns]:
        with tempfile.TemporaryDirectory(prefix="jrec-") as folder:
            places = [pathlib.Path(folder) / str(number) for number in range(len(paths))]
            files = [
                spool(path, place) if is_stream(path) else Input(name=path, file=path)
                for path, place in zip(paths, places, strict=True)
            ]
            log = Log(source, files, key_seed=self._key_seed, threads=threads)
            bad = BadLines(pathlib.Path(folder) / "bad", skip=False)
            bad.remedy = "Fix the line: every line gets a prediction"
            chunks = source.assemble(log.converted(lambda _: None, bad))
            encoded = (self._encoded(chunk, unknown, labelled=log.labelled) for chunk in chunks if len(chunk.labels))
            pieces = of_size(encoded, batch_size)
            # Of no line at all there is a piece, too, which says whether the log has labels.
            yield next(pieces, None) or self._encoded(self._unknown_values(0), None, labelled=log.labelled)
            yield from pieces
            if report is not None:
                for remark in source.remarks():
                    report(remark)

    def _encoded(self, chunk: Chunk, unknown: UnknownValues | None, *, labelled: bool = False) -> EncodedColumns:
        names = tuple(f.name for f in self.schema.dense)
        # Column by column, as it is filled here and read by the packer.
        dense = np.empty((len(chunk.labels), len(names)), np.float32, order="F")
        # Statistics are of single values, crosses among them.
        keys_of = {name: keys for name, keys in chunk.keys.items() if isinstance(keys, np.ndarray)}
        values = {**chunk.dense, **values_by_keys(self.schema.dense, keys_of, self._label_counts)}
        for k, name in enumerate(names):
            dense[:, k] = values[name]
        keys, weights = {**chunk.keys}, {**chunk.weights}
        for feature in self.schema.categorical:
            if feature.fixed_length and isinstance(lists := keys[feature.name], ListColumn):
                # A list of a fixed length that is missing: the model promises the length, so it becomes missing values.
                keys[feature.name] = _filled(lists, feature.max_length, MISSING)
                if feature.name in weights:
                    weights[feature.name] = _filled(weights[feature.name], feature.max_length, 0)
        ids = {f.name: self._ids(f, keys[f.name]) for f in self.schema.categorical}
        if unknown is not None:
            for feature in self.schema.categorical:
                unknown.add(feature, keys[feature.name], ids[feature.name], chunk.texts.get(feature.name))
        return EncodedColumns(
            dense_names=names,
            dense=dense,
            ids=ids,
            weights={name: lists.values.astype(np.float32) for name, lists in weights.items()},
            labels=chunk.labels if labelled else None,
            tasks=chunk.tasks if labelled else {},
        )

    def _ids(self, feature: CategoricalFeature, keys: Column) -> Column:
        encode = self._encoder(feature.table)
        if isinstance(keys, np.ndarray):
            return encode(keys)
        lengths = np.diff(keys.offsets)
        wrong = lengths != feature.max_length if feature.fixed_length else lengths > feature.max_length
        if wrong.any():
            k = int(wrong.argmax())
            bound = "must have" if feature.fixed_length else "may have up to"
            raise DatasetError(
                f"feature {feature.name!r} has {lengths[k]:,} values in example {k}, but {bound} {feature.max_length:,}"
            )
        return ListColumn(keys.offsets, encode(keys.values))

    def _label_counts(self, file: str) -> LabelCounts:
        if (counts := self._counts.get(file)) is None:
            counts = self._counts[file] = LabelCounts.load(self._folder, self.schema, file)
        return counts

    def _encoder(self, table: str) -> Callable[[np.ndarray], np.ndarray]:
        if (encode := self._encoders.get(table)) is None:
            loaded = load_table(self._folder, self.schema, self.schema.table(table), self._key_seed)
            encode = self._encoders[table] = loaded.encoder()
        return encode


def _filled(lists: ListColumn, length: int, value: np.generic | int) -> ListColumn:
    """The same lists, in which an empty one has ``length`` times a value."""
    offsets = np.asarray(lists.offsets, np.int64)
    empty = np.diff(offsets) == 0
    if not empty.any():
        return lists
    values = np.insert(lists.values, np.repeat(offsets[:-1][empty], length), value)
    return ListColumn(offsets + length * np.concatenate([[0], np.cumsum(empty)]), values)


def _log_source(schema: Schema) -> LogFormat | None:
    """The format of a dataset whose examples are the lines of its log; None where lines do not make examples.

    Raises:
      DatasetError: If the schema says that it was prepared from a log that cannot be, or has not its features.
    """
    if (source := stored_log(schema)) is None or isinstance(source, Taobao):
        return source
    _check_features(schema, source)
    source = source.with_labels("optional").limited({f.name: f.max_length for f in schema.categorical})
    return source.fitted(*learned_of(schema)).predicted()


def stored_log(schema: Schema) -> LogFormat | None:
    """The format of the log that a dataset was prepared from, as it was; None where its lines do not make examples.

    Raises:
      DatasetError: If the schema says that it was prepared from a log that cannot be.
    """
    made = schema.preparation
    options, name = made.get("format_options"), made.get("format")
    options = options if isinstance(options, Mapping) else {}
    if "schema" in options:
        where = f"schema.json of {schema.name!r}: provenance.format_options.schema"
        columns = read_stored(options["schema"], where=where, error=DatasetError)
        check_schema(columns, where)
        source = csv_source(columns)
        source.steps = steps_of(schema)
        return source
    if name in ("criteo-kaggle", "criteo-terabyte"):
        return Criteo(str(name))
    if name == Avazu.name:
        return Avazu()
    if name == Taobao.name and options.get("form") != "sequence":
        return Taobao()
    return None


def _check_features(schema: Schema, source: LogFormat) -> None:
    made = {f.name: f"{f.transform}, dense" for f in source.dense}
    made |= {f.name: f"of table {f.table}, {'' if f.weighted else 'not '}weighted" for f in source.categorical}
    said = {f.name: f"{f.transform}, dense" for f in schema.dense}
    said |= {f.name: f"of table {f.table}, {'' if f.weighted else 'not '}weighted" for f in schema.categorical}
    for name, recorded in said.items():
        if recorded != (other := made.get(name, "not there")):
            raise DatasetError(
                f"schema.json of {schema.name!r}: feature {name!r} is {recorded}, but by its provenance it is {other};"
                f" {_REMEDY}"
            )


class _FeatureColumns(LogFormat):
    """Columns that are called as the features: for datasets whose format makes examples of several lines or files."""

    def __init__(self, schema: Schema):
        self.name = schema.name
        self.dense = schema.dense
        self._features, self._canonical = schema.categorical, schema.canonical
        self._keeps_last = schema.provenance.get(LISTS) == KEEP_LAST
        self.categorical = tuple(
            CategoricalSpec(name=f.name, table=f.table, many=not f.one_hot, weighted=f.weighted)
            for f in schema.categorical
        )

    def raw_fields(self) -> tuple[Field, ...]:
        """A field a feature, and the weights of those that have some."""
        fields = [Field(name=f.name, kind="number", blank=f.missing is not None) for f in self.dense]
        for feature in self._features:
            kind = "text" if feature.one_hot else "texts"
            fields.append(Field(name=feature.name, kind=kind, canonical=self._canonical))
            if feature.weighted:
                fields.append(Field(name=feature.name + WEIGHT_SUFFIX, kind="weights"))
        return tuple(fields)

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Transformed dense values, keys, weights."""
        for feature in self.dense:
            reject_dense(parsed, feature.name, feature.transform)
        weights = {f.name: parsed.lists(f.name + WEIGHT_SUFFIX) for f in self._features if f.weighted}
        keys = {f.name: parsed.columns[f.name] for f in self._features}
        if self._keeps_last:
            keys = {f.name: _last(keys[f.name], f.max_length) for f in self._features}
        return Chunk(
            labels=np.zeros(parsed.rows, np.float32),
            dense={f.name: dense_column(parsed, f.name, f, f.missing) for f in self.dense},
            keys=keys,
            weights={name: ListColumn(w.offsets, w.values.astype(np.float32)) for name, w in weights.items()},
        )


def _last(lists: Column, length: int) -> Column:
    """The last values of each list, at most ``length``."""
    if not isinstance(lists, ListColumn):
        return lists
    stops = lists.offsets[1:].astype(np.int64)
    lengths = np.minimum(stops - lists.offsets[:-1], length)
    return lists_at(lists.values, stops - lengths, lengths)
