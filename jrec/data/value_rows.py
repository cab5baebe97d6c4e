"""Rows of a log's own values: by hash, by a mapping, or by the vocabulary of a prepared dataset."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from jrec.data.column_forms import Form, brief
from jrec.data.keys import Spans, value_keys
from jrec.data.schema import DatasetError, Schema, Table
from jrec.data.vocabulary import HashedTable, KeyTable, Vocabulary
from jrec.data.vocabulary_file import load_table
from jrec.ops.layout import FeatureConfig

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.data.unknown import UnknownCounts

UNKNOWN = -1
_HASHED_ROWS = 2**32  # buckets are uint32


@runtime_checkable
class TableVocabulary(Protocol):
    """Which row of a table each value has."""

    @property
    def oov_row(self) -> int | None:
        """The row of values without one of their own, or None."""
        ...

    @property
    def complete(self) -> bool:
        """Whether every value has a row."""
        ...

    def rows(self, values: np.ndarray | pa.Array) -> np.ndarray:
        """(n,) int64 rows, -1 for values without one.

        Args:
          values: (n,) integers of NumPy, or texts as a LargeBinaryArray of Arrow.
        """
        ...


AnyVocabulary = TableVocabulary | Mapping[Any, int] | Literal["hash"]
"""A vocabulary, a mapping from values to rows, or "hash": the row is the value's hash bucket, as ``jrec prepare`` has
for tables that --max-rows caps, before it orders rows by their frequency."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeyVocabulary:
    """The rows that a table gives to the keys of values (``jrec.data.keys``).

    Attributes:
      table: The values of a prepared dataset's table, or hash buckets, which give every value a row.
      key_seed: The seed of the hash of long texts.
      oov_row: The row of rare and unknown values.
      canonical: Whether texts are brought into one form (``Schema.canonical``) before they are looked up.
      oov_share: The share of training's values that have that row; None where the dataset does not say.
    """

    table: Vocabulary | HashedTable
    key_seed: int = 0
    oov_row: int | None = None
    canonical: bool = False
    oov_share: float | None = None

    @property
    def complete(self) -> bool:
        """Whether every value has a row, which its hash determines."""
        return isinstance(self.table, HashedTable)

    @functools.cached_property
    def _encode(self) -> Callable[[np.ndarray], np.ndarray]:
        return self.table.encoder()

    def rows(self, values: np.ndarray | pa.Array) -> np.ndarray:
        """(n,) int64 rows of integers or texts, -1 for rare and unknown ones."""
        rows = self._encode(value_keys(values, self.key_seed, canonical=self.canonical)).astype(np.int64)
        # The caller says what becomes of unknown values: an error, or the OOV row.
        return rows if self.complete else np.where(rows == self.table.oov_row, UNKNOWN, rows)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MappingVocabulary:
    """A row for every key of a mapping, texts or integers.

    Attributes:
      table: The table's name, for messages.
      mapping: From values to rows.
    """

    table: str
    mapping: Mapping[Any, int]
    oov_row: int | None = None
    complete: bool = False

    def rows(self, values: np.ndarray | pa.Array) -> np.ndarray:
        """(n,) int64 rows of integers or texts, -1 for those that are no keys."""
        items = values.tolist() if isinstance(values, np.ndarray) else _texts(values)
        rows = np.array([self.mapping.get(value, UNKNOWN) for value in items])
        if rows.size and rows.dtype.kind not in "iu":
            raise ValueError(f"the vocabulary of table {self.table!r} must map values to row numbers, not {rows.dtype}")
        return rows.astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """A table that grows: values become keys, which get rows batch by batch (``GrowingTables.mapper``).

    Attributes:
      stored: Whether the values are keys already, as a dataset holds them.
      key_seed: The seed of the hash of long texts.
      canonical: Whether texts are brought into one form (``Schema.canonical``) before they are looked up.
    """

    stored: bool = False
    key_seed: int = 0
    oov_row: int | None = 0
    complete: bool = True
    canonical: bool = False

    def rows(self, values: np.ndarray | pa.Array) -> np.ndarray:
        """(n,) uint64 keys of integers or texts, or of (n,) uint64 keys."""
        return values.astype(np.uint64) if self.stored else value_keys(values, self.key_seed, canonical=self.canonical)


def load_vocabularies(folder: str | os.PathLike[str], *, key_seed: int = 0) -> dict[str, TableVocabulary]:
    """The vocabularies of a prepared dataset by table, for ``pack_batch``: values get the rows that they have there.

    Rows are those that the dataset stores. Where it was reordered (``jrec reorder``), give ``pack_batch`` its
    ``orders`` as well.

    Args:
      folder: The dataset, made by ``jrec prepare``.
      key_seed: The ``--key-seed`` of its preparation.

    Raises:
      DatasetError: If a table has no vocabulary, as in synthetic data and where it grows, or its values were hashed
        with another seed.

    Example:
      >>> vocabularies = load_vocabularies("data")
      >>> columns = {"user": ["u17", "u4"], "item": ["i2", "i6"]}
      >>> batch = jrec.data.pack_batch(layout, columns, label=None, vocabularies=vocabularies, on_bad_id="oov")
    """
    folder, vocabularies = pathlib.Path(folder), {}
    schema = Schema.load(folder)
    schema.check_numbered(
        "load_vocabularies reads which value has which row", remedy="let a run give them rows, see docs/growing.md"
    )
    for table in schema.tables:
        vocabularies[table.name] = load_vocabulary(folder, schema, table, key_seed=key_seed)
    return vocabularies


def load_vocabulary(folder: pathlib.Path, schema: Schema, table: Table, *, key_seed: int) -> KeyVocabulary:
    """The vocabulary of one table, which does not grow; see ``load_vocabularies``."""
    loaded = load_table(folder, schema, table, key_seed)
    assert not isinstance(loaded, KeyTable)  # the caller has seen to it
    return KeyVocabulary(
        table=loaded,
        key_seed=key_seed,
        oov_row=table.oov_row,
        canonical=schema.canonical,
        oov_share=table.oov_share,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueRows:
    """Turns columns of values into columns of rows.

    Attributes:
      vocabularies: By table whose columns hold values, not row numbers.
      oov_rows: By table the row of values without one; None to raise.
      unknown: Counts the values without a row, if anybody asks.
    """

    vocabularies: Mapping[str, TableVocabulary] = dataclasses.field(default_factory=dict)
    oov_rows: Mapping[str, int] | None = None
    unknown: UnknownCounts | None = None

    @functools.cached_property
    def keyed(self) -> frozenset[str]:
        """The tables whose vocabularies give keys (``Keys``), not rows."""
        return frozenset(name for name, own in self.vocabularies.items() if isinstance(own, Keys))

    def rows(self, feature: FeatureConfig, form: Form) -> np.ndarray:
        """(n,) integers: the rows of a form's values, all of them present; keys (uint64) of a table that grows.

        Raises:
          DatasetError: A value without a row, or texts of a table without a vocabulary.
          ValueError: Values that are neither integers nor texts.
        """
        vocabulary = self.vocabularies.get(feature.table)
        if not form.is_text and form.values.dtype.kind not in "iu":
            raise ValueError(
                f"ids of {feature.name!r} must be integers, but are {form.values.dtype}; cast them, and missing ones to"
                " null or -1 (pandas: .astype('Int64'))"
            )
        if vocabulary is None:
            if form.is_text and len(form.values):
                raise DatasetError(
                    f"{feature.name!r} holds texts, such as {_text(form.values, 0)!r} in example {form.example_of(0)},"
                    f" but table {feature.table!r} has no vocabulary; give"
                    f" vocabularies={{{feature.table!r}: 'hash'}}, a mapping from its values to rows, or"
                    " load_vocabularies(dataset)"
                )
            return np.zeros(0, np.int64) if form.is_text else form.values
        rows = vocabulary.rows(form.values)
        if self.unknown is not None:
            self._count(self.unknown, feature, form, rows)
        if vocabulary.complete:
            return rows
        unknown = rows == UNKNOWN
        if not unknown.any():
            return rows
        if self.oov_rows is None:
            k = int(unknown.argmax())
            raise DatasetError(
                f"{_text(form.values, k)!r} of feature {feature.name!r} in example {form.example_of(k)} is not in the"
                f" vocabulary of table {feature.table!r}; add it, or choose on_bad_id 'oov'"
            )
        return np.where(unknown, self.oov_rows[feature.table], rows)

    def _count(self, counts: UnknownCounts, feature: FeatureConfig, form: Form, rows: np.ndarray) -> None:
        """Counts a form's values, of which an empty text is a missing one; of hashed tables none is unknown."""
        vocabulary, values = self.vocabularies[feature.table], len(form.values)
        # A table that grows gives every value a row, those without one of their own the same.
        row = vocabulary.oov_row if vocabulary.complete else UNKNOWN
        if row is None:
            return
        unknown = rows == row
        if form.is_text:
            texts = Spans.of(form.values)
            empty = texts.starts == texts.ends
            values, unknown = values - int(np.count_nonzero(empty)), unknown & ~empty
        some = (brief(str(_text(form.values, k))) for k in np.flatnonzero(unknown)[:1000].tolist())
        # Vocabularies of a user's own need not say it.
        trained = getattr(vocabulary, "oov_share", None)
        counts.count(feature.name, values, int(np.count_nonzero(unknown)), some, trained=trained)


def vocabulary_of(table: str, vocabulary: AnyVocabulary, rows: int) -> TableVocabulary:
    """A vocabulary from what a user gives for a table of ``rows`` rows.

    Raises:
      ValueError: If it is none, or the table has too many rows to hash.
    """
    if isinstance(vocabulary, str) and vocabulary == "hash":
        if rows > _HASHED_ROWS:
            raise ValueError(f"table {table!r} has {rows:,} rows, but values are hashed to at most {_HASHED_ROWS:,}")
        return KeyVocabulary(table=HashedTable(rows))
    if isinstance(vocabulary, Mapping):
        return MappingVocabulary(table=table, mapping=vocabulary)
    if isinstance(vocabulary, TableVocabulary):
        return vocabulary
    raise ValueError(
        f"the vocabulary of table {table!r} is {vocabulary!r}; give 'hash', a mapping from values to rows, or one of"
        " load_vocabularies(dataset)"
    )


def _texts(values: pa.Array) -> list[str]:
    import pyarrow as pa

    return values.cast(pa.large_string()).to_pylist()


def _text(values: np.ndarray | pa.Array, k: int) -> object:
    value = values[k].item() if isinstance(values, np.ndarray) else values[k].as_py()
    return value.decode(errors="replace") if isinstance(value, bytes) else value
