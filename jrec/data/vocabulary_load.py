"""A prepared dataset's tables, read back: what gives other data the rows that its values have there."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jrec.data.readers.keys import hash_texts, is_text
from jrec.data.readers.parquet import read_batches
from jrec.data.readers.parse import LongTexts
from jrec.data.schema import DatasetError, Schema, Table
from jrec.data.value_keys import text_bounds
from jrec.data.vocabulary import HashedTable, KeyTable, Vocabulary

_ROWS = 1 << 17  # values of a vocabulary in memory at a time
_AGAIN = "copy it again, or prepare the dataset again"


def preparation(schema: Schema) -> Mapping[str, Any]:
    """How a dataset was prepared; of a part of a dataset that `jrec fae pack` made, how that dataset was."""
    made: Any = schema.provenance
    while isinstance(made, Mapping) and "format" not in made and "source" in made:
        made = made["source"]
    return made if isinstance(made, Mapping) else {}


def key_seed_of(schema: Schema) -> int:
    """The seed of the hash of long values that a dataset was prepared with."""
    options = preparation(schema).get("options")
    seed = options.get("key_seed") if isinstance(options, Mapping) else None
    return seed if isinstance(seed, int) else 0


def dataset_key_seed(folder: str) -> int:
    """The same, of the dataset in a folder."""
    return key_seed_of(Schema.load(folder, check_files=False))


def load_table(
    folder: pathlib.Path, schema: Schema, table: Table, key_seed: int
) -> Vocabulary | HashedTable | KeyTable:
    """How a table's values got their rows, or keys if it grows, without counts.

    Args:
      folder: The dataset's folder, of which only the file of this table's vocabulary or buckets is read.
      schema: The dataset.
      table: One of its tables.
      key_seed: The seed of the hash of long values.

    Raises:
      DatasetError: If the table has neither vocabulary nor buckets, as in synthetic data, or the file is damaged or of
        another seed.
    """
    if table.growing:
        return KeyTable(table.rows)
    if table.vocabulary is not None:
        path = schema.check_file(folder, table.vocabulary)
        return Vocabulary(read_keys(path, table, key_seed), np.empty(0, np.int64), _oov_row(table))
    path = folder / buckets_file(table.name)
    if not path.is_file():
        raise DatasetError(
            f"table {table.name!r} of {folder} has no vocabulary: synthetic data has none, and a damaged copy may lack"
            " it; prepare a log with `jrec prepare`, or copy the folder again"
        )
    return HashedTable(read_buckets(path, table, key_seed), np.empty(0, np.int64))


def buckets_file(table: str) -> str:
    """Where the rows of a hashed table's buckets are, relative to the dataset's folder."""
    return f"buckets/{table}.npy"


def read_buckets(path: pathlib.Path, table: Table, key_seed: int) -> np.ndarray:
    """(rows,) uint32, the row of each hash bucket.

    Raises:
      DatasetError: If the file cannot be read, or is not what the schema says for this seed.
    """
    try:
        row_of_bucket = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    digest = hashlib.sha256(f"buckets, key seed {key_seed}\n".encode())
    digest.update(np.ascontiguousarray(row_of_bucket, "<u4").data)
    if row_of_bucket.shape != (table.rows,) or (table.numbering and digest.hexdigest() != table.numbering):
        raise DatasetError(
            f"{path} is not what the schema says for key seed {key_seed}; give the --key-seed of the preparation as"
            " key_seed, or copy the file again"
        )
    return row_of_bucket


def read_keys(path: pathlib.Path, table: Table, key_seed: int) -> np.ndarray:
    """(rows,) uint64 keys of a vocabulary in order of rows; the OOV row's means nothing.

    Raises:
      DatasetError: If the file cannot be read, has not the table's rows, or has a value twice.
    """
    keys, at = np.empty(table.rows, np.uint64), 0
    for texts in _texts(path):
        hashed = hash_texts(*texts, np.uint64(key_seed))[0]
        if at + len(hashed) <= table.rows:
            keys[at : at + len(hashed)] = hashed
        at += len(hashed)
    if at != table.rows:
        raise DatasetError(f"{path} has {at:,} values, but table {table.name!r} has {table.rows:,} rows; {_AGAIN}")
    known = keys.copy() if table.oov_row is None else np.delete(keys, table.oov_row)
    known.sort()
    if (known[1:] == known[:-1]).any():
        raise DatasetError(f"{path} has a value twice, or two of one hash; prepare table {table.name!r} again")
    return keys


def long_texts(path: pathlib.Path, key_seed: int) -> Iterator[LongTexts]:
    """The texts of a vocabulary whose keys are hashes."""
    for buffer, ends in _texts(path):
        keys, fingerprints = hash_texts(buffer, ends, np.uint64(key_seed))
        long = is_text(keys)
        if long.any():
            places = (np.flatnonzero(long), keys[long], fingerprints[long], ends[:-1][long], ends[1:][long])
            yield LongTexts(*places, buffer)


def _oov_row(table: Table) -> int:
    return table.rows if table.oov_row is None else table.oov_row


def _texts(path: pathlib.Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of the column of values: uint8 bytes, and (values + 1,) int64 bounds in them."""
    import pyarrow as pa

    for batch in read_batches(path, ["value"], _ROWS, remedy=_AGAIN):
        yield text_bounds(batch.column(0).fill_null("").cast(pa.large_string()))
