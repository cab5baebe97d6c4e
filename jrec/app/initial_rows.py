"""Pretrained vectors as the first rows of tables, by value: ``tables.overrides.NAME.initial_rows``."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jrec.app.config import TrainConfig
from jrec.data.arrow_values import arrow_compute, is_list
from jrec.data.bijection import load_order
from jrec.data.column_forms import brief, form_of
from jrec.data.schema import Schema, Table
from jrec.data.value_rows import KeyVocabulary, load_vocabulary
from jrec.errors import ConfigError
from jrec.prepare.readers import tables

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.run.run import Run

_ROWS = 1 << 16  # vectors in memory at a time


def files_of(config: TrainConfig) -> dict[str, str]:
    """The files of vectors that a configuration names, by table."""
    return {name: own.initial_rows for name, own in config.tables.overrides.items() if own.initial_rows}


def check_initial_rows(config: TrainConfig, schema: Schema) -> None:
    """Refuses vectors that cannot be a table's first rows, before any program is compiled.

    Raises:
      ConfigError: If a file is not there, or has no values and vectors of the table's embeddings; if the table grows,
        or hashes its values; or if the run begins from another one, which brings rows.
      DatasetError: If a file is damaged.
    """
    for name, file in files_of(config).items():
        key = f"tables.overrides.{name}.initial_rows"
        if config.init_from:
            raise ConfigError(
                f"{key} is {file!r}, but init_from = {config.init_from!r} brings rows; leave out one of them"
            )
        if not pathlib.Path(file).is_file():
            raise ConfigError(f"{key}: {file} is no file; give a file of values and vectors")
        table = next((table for table in schema.tables if table.name == name), None)
        if table is None:
            continue  # ``plan_tables`` says so of every override
        if table.growing or table.vocabulary is None:
            kind = "grows: its rows are given to values as they come" if table.growing else "has no vocabulary"
            raise ConfigError(
                f"{key} is {file!r}, but the table {kind}, so that no row is a value's; prepare the log with a"
                " vocabulary of it, or set rows by number with Run.set_rows"
            )
        vectors = Vectors.opened(file, key)
        if vectors.dim != config.model.embedding_dim:
            raise ConfigError(
                f"{key}: {file} has vectors of {vectors.dim} elements, but model.embedding_dim is"
                f" {config.model.embedding_dim}; set model.embedding_dim={vectors.dim}"
            )


def set_initial_rows(run: Run, config: TrainConfig, schema: Schema) -> None:
    """Sets the rows of a run that begins; says on standard error how many, once for all processes.

    Raises:
      ConfigError: If a file has a value twice, none, a vector that is not finite, or no value of the table.
    """
    from jrec.run.processes import first

    for name, file in files_of(config).items():
        key, table = f"tables.overrides.{name}.initial_rows", schema.table(name)
        taken = RowsByValue.of(schema, table, f"{key}: {file}")
        for values, vectors in Vectors.opened(file, key).read():
            chosen, rows = taken.rows(values)
            try:
                run.set_rows(name, rows, _with_vectors(run.rows(name, rows), vectors[chosen], config))
            except ValueError as error:
                raise ConfigError(f"{key}: {file}: {error}") from error
        taken.check()
        if first():
            begun = f"{taken.count:,} of the {table.rows:,} rows of table {name!r} begin as {file} has them"
            unknown = f"; {taken.unknown:,} of its vectors are of values that training lacks" if taken.unknown else ""
            sys.stderr.write(f"jrec: {begun}{unknown}\n")


def _with_vectors(rows: np.ndarray, vectors: np.ndarray, config: TrainConfig) -> np.ndarray:
    """(n, table_dim) rows with (n, embedding_dim) vectors in place of each member's embedding."""
    model = config.model
    if rows.shape[1] == vectors.shape[1]:
        return vectors
    each = rows.astype(np.float32).reshape(len(rows), -1, model.embedding_dim + model.wide)
    each[:, :, : model.embedding_dim] = vectors[:, None]  # what is left is the first-order weight of a wide model
    return each.reshape(rows.shape)


@dataclasses.dataclass(kw_only=True, eq=False)
class RowsByValue:
    """The rows of a table by the values of a file, each of which may be there once.

    Attributes:
      where: The file, for messages.
      vocabulary: The table's values.
      order: (rows,) the model's row of every stored one; None where they are the same.
      taken: (rows,) bool, which rows the values so far have.
      unknown: How many of the values so far have no row.
      example: The first value.
    """

    where: str
    vocabulary: KeyVocabulary
    order: np.ndarray | None
    taken: np.ndarray
    unknown: int = 0
    example: str = ""

    @staticmethod
    def of(schema: Schema, table: Table, where: str) -> RowsByValue:
        """No rows yet, of a prepared dataset's table with a vocabulary."""
        assert schema.folder is not None  # a run trains on a dataset that lies somewhere
        folder = pathlib.Path(schema.folder)
        vocabulary = load_vocabulary(folder, schema, table, key_seed=schema.key_seed)
        order = load_order(folder, table)
        return RowsByValue(where=where, vocabulary=vocabulary, order=order, taken=np.zeros(table.rows, bool))

    @property
    def count(self) -> int:
        """How many rows the values so far have."""
        return int(self.taken.sum())

    def rows(self, values: pa.Array | list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Which of some further values have rows, (n,) positions, and these rows, (n,) int64.

        Raises:
          ConfigError: If a value is null, or was there before.
        """
        form = form_of("the values", values, categories=True)
        if form.present is not None and not form.present.all():
            raise ConfigError(f"{self.where}: a value is null; leave out the line")
        rows = self.vocabulary.rows(form.values)
        chosen = np.flatnonzero(rows >= 0)
        self.unknown += rows.size - chosen.size
        self.example = self.example or (brief(str(values[0])) if rows.size else "")
        rows = rows[chosen] if self.order is None else self.order[rows[chosen]].astype(np.int64)
        distinct, counts = np.unique(rows, return_counts=True)
        # A row that an earlier piece of the file gave, or this one gives twice: which vector counts would be chance.
        if (twice := self.taken[rows] | np.isin(rows, distinct[counts > 1])).any():
            raise ConfigError(
                f"{self.where}: {brief(str(values[int(chosen[twice.argmax()])]))} is there twice; leave out one"
            )
        self.taken[rows] = True
        return chosen, rows

    def check(self) -> None:
        """Refuses values of which none has a row.

        Raises:
          ConfigError: Names one of them.
        """
        if not self.taken.any():
            raise ConfigError(
                f"{self.where}: none of the {self.unknown:,} values, such as {self.example}, is one of the table's in"
                " the dataset; give the values of the log, not numbers of rows"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors:
    """A file of values and vectors.

    Attributes:
      path: The file.
      dim: Elements of a vector.
      value: The column of values; "" in word2vec's text format.
      columns: The column of lists, or the columns of elements.
    """

    path: str
    dim: int
    value: str = ""
    columns: tuple[str, ...] = ()

    @staticmethod
    def opened(path: str, key: str) -> Vectors:
        """Reads what the file holds.

        Raises:
          ConfigError: Names ``key``, and what is not there.
          DatasetError: If the file is damaged.
        """
        if not tables.is_table(path):
            return Vectors(path=path, dim=_text_dim(path, key))
        types = tables.column_types(path)
        lists = [name for name, dtype in types.items() if is_list(dtype)]
        floats = [name for name, dtype in types.items() if _is_float(dtype)]
        values = [name for name in types if name not in {*lists, *floats}]
        if len(values) != 1 or (len(lists), bool(floats)) not in ((1, False), (0, True)):
            raise ConfigError(
                f"{key}: {path} has the columns {', '.join(types)}; give one column of values (texts or integers), and"
                " the vectors as one column of lists, or as columns of floats"
            )
        dim = len(floats)
        for batch in tables.read_batches(path, lists, 1) if lists else ():
            dim = len(batch.column(0)[0].as_py() or ())
            break
        return Vectors(path=path, dim=dim, value=values[0], columns=tuple(lists or floats))

    def read(self) -> Iterator[tuple[pa.Array | list[str], np.ndarray]]:
        """Values, an Arrow array or a list of texts, and (n, dim) float32 of their vectors.

        Raises:
          ConfigError: If a vector has another length, or a null.
        """
        if not self.value:
            yield from self._read_text()
            return
        at = 0
        for batch in tables.read_batches(self.path, [self.value, *self.columns], _ROWS):
            yield batch.column(0), self._matrix(batch, at)
            at += batch.num_rows

    def _matrix(self, batch: pa.RecordBatch, at: int) -> np.ndarray:
        import pyarrow as pa

        pc = arrow_compute()
        columns = batch.columns[1:]
        if is_list(columns[0].type):
            lengths = pc.fill_null(pc.list_value_length(columns[0]), -1).to_numpy(zero_copy_only=False)
            if (wrong := lengths != self.dim).any():
                k = int(wrong.argmax())
                raise ConfigError(
                    f"{self.path}: the vector of {batch.column(0)[k]} (line {at + k + 1:,}) has"
                    f" {max(int(lengths[k]), 0)} elements, but the first has {self.dim}"
                )
            columns = [pc.list_flatten(columns[0])]
        columns = [column.cast(pa.float32(), safe=False) for column in columns]
        if any(column.null_count for column in columns):
            raise ConfigError(
                f"{self.path}: an element of a vector of lines {at + 1:,} to {at + batch.num_rows:,} is null"
            )
        arrays = [column.to_numpy(zero_copy_only=False) for column in columns]
        return arrays[0].reshape(-1, self.dim) if len(arrays) == 1 else np.stack(arrays, axis=1)

    def _read_text(self) -> Iterator[tuple[pa.Array | list[str], np.ndarray]]:
        values, vectors = list[str](), list[np.ndarray]()
        with pathlib.Path(self.path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and _is_header(line):
                    continue
                # From the end: a value may have blanks in it.
                parts = line.rstrip().rsplit(" ", self.dim)
                try:
                    vectors.append(np.array(parts[1:], np.float32))
                except ValueError:
                    parts = []
                if len(parts) != self.dim + 1:
                    raise ConfigError(f"{self.path}: line {number:,} is no value with {self.dim} numbers behind it")
                values.append(parts[0])
                if len(values) == _ROWS:
                    yield values, np.stack(vectors)
                    values, vectors = [], []
        if values:
            yield values, np.stack(vectors)


def _text_dim(path: str, key: str) -> int:
    """Elements of the vectors of a text file: as its header says, or as its first line has numbers."""
    try:
        with pathlib.Path(path).open(encoding="utf-8") as file:
            line = file.readline()
        parts = line.split()
        dim = int(parts[1]) if _is_header(line) else len([float(part) for part in parts[1:]])
    except ValueError:  # a UnicodeDecodeError is one
        dim = 0
    if not dim:
        raise ConfigError(
            f"{key}: {path} is neither Parquet, Arrow nor JSON lines, nor word2vec's text format, a value with numbers"
            " behind it on each line"
        )
    return dim


def _is_header(line: str) -> bool:
    """Whether a line has the numbers of vectors and of their elements."""
    parts = line.split()
    return len(parts) == 2 and all(part.isdecimal() for part in parts)


def _is_float(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(dtype)
