"""What a dataset keeps of a table: ``counts/TABLE.npy``, ``vocabulary/TABLE.parquet`` or ``buckets/TABLE.npy``.

Read back, they give other data the rows that its values have there.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jrec.data.keys import Spans, decode_keys, hash_texts
from jrec.data.long_texts import LongTexts
from jrec.data.parquet import read_batches
from jrec.data.schema import DatasetError, Schema, Table
from jrec.data.texts import TextStore
from jrec.data.vocabulary import HashedTable, KeyTable, Vocabulary
from jrec.files import sha256_of

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1 << 17  # values of a vocabulary in memory at a time
_AGAIN = "copy it again, or prepare the dataset again"


def buckets_file(table: str) -> str:
    """Where the rows of a hashed table's buckets are, relative to the dataset's folder."""
    return f"buckets/{table}.npy"


def save_table(
    folder: pathlib.Path,
    name: str,
    built: Vocabulary | HashedTable | KeyTable,
    texts: TextStore | None,
    *,
    key_seed: int,
) -> Table:
    """Writes a table's files and returns its entry in the schema; ``key_seed`` is of the hash of long values."""
    if isinstance(built, KeyTable):
        digest = hashlib.sha256(f"keys, key seed {key_seed}\n".encode())
        return Table(name=name, rows=built.rows, numbering=digest.hexdigest(), growing=True)
    for kind in ("counts", "vocabulary", "buckets"):
        (folder / kind).mkdir(exist_ok=True)
    counts = f"counts/{name}.npy"
    np.save(folder / counts, built.counts, allow_pickle=False)
    if isinstance(built, HashedTable):
        assert built.row_of_bucket is not None  # rows of a dataset descend by frequency
        np.save(folder / buckets_file(name), built.row_of_bucket, allow_pickle=False)
        numbering = _buckets_digest(built.row_of_bucket, key_seed)
        return Table(name=name, rows=len(built.counts), counts=counts, numbering=numbering)
    vocabulary = f"vocabulary/{name}.parquet"
    numbering = _save_vocabulary(folder / vocabulary, built, texts)
    return Table(
        name=name,
        rows=len(built.counts),
        oov_row=built.oov_row,
        counts=counts,
        vocabulary=vocabulary,
        numbering=numbering,
        oov_share=oov_share(built.counts, built.oov_row),
    )


def oov_share(counts: np.ndarray, oov_row: int | None) -> float | None:
    """The OOV row's share of a table's accesses, (rows,) integers: 0 to 1. None without an OOV row or any access."""
    total = int(counts.sum())
    return None if oov_row is None or not total else int(counts[oov_row]) / total


def copy_vocabulary(source: pathlib.Path, target: pathlib.Path, counts: np.ndarray) -> None:
    """Copies a vocabulary with other counts, (rows,) int64."""
    import pyarrow as pa

    with _writer(target) as writer:
        at = 0
        for batch in _batches(source, ["value", "row"]):
            stop = at + batch.num_rows
            writer.write_table(pa.table([*batch.columns, pa.array(counts[at:stop])], schema=writer.schema))
            at = stop


def _batches(path: pathlib.Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    return read_batches(path, names, _ROWS, remedy=_AGAIN)


def file_digests(folder: pathlib.Path, tables: Sequence[Table], threads: int) -> dict[str, str]:
    """SHA-256 of the files that tables name, by path relative to the folder; reads ``threads`` of them at once."""
    files = [file for t in tables for file in (t.counts, t.vocabulary) if file is not None]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return dict(zip(files, pool.map(lambda file: sha256_of(folder / file), files), strict=True))


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
        oov_row = table.rows if table.oov_row is None else table.oov_row
        return Vocabulary(_read_keys(path, table, key_seed), oov_row)
    path = folder / buckets_file(table.name)
    if not path.is_file():
        raise DatasetError(
            f"table {table.name!r} of {folder} has no vocabulary: synthetic data has none, and a damaged copy may lack"
            " it; prepare a log with `jrec prepare`, or copy the folder again"
        )
    return HashedTable(table.rows, _read_buckets(path, table, key_seed))


def table_values(folder: pathlib.Path, schema: Schema, table: Table) -> pa.Array | None:
    """The values of a table's rows, (rows,) texts in the order of the rows, null for the OOV row.

    Args:
      folder: The dataset's folder, or an export's.
      schema: The dataset.
      table: One of its tables.

    Returns:
      The values; None of a table without a vocabulary, which was hashed or synthesized.

    Raises:
      DatasetError: If the vocabulary cannot be read, or has not the table's rows in their order.
    """
    if table.vocabulary is None:
        return None
    import pyarrow as pa

    path = schema.check_file(folder, table.vocabulary)
    pieces, at = [], 0
    for batch in _batches(path, ["value", "row"]):
        if not np.array_equal(batch["row"].to_numpy(), np.arange(at, at + batch.num_rows)):
            raise DatasetError(f"{path} does not have its rows in order; {_AGAIN}")
        pieces.append(batch["value"].cast(pa.large_string()))
        at += batch.num_rows
    if at != table.rows:
        raise DatasetError(f"{path} has {at:,} values, but table {table.name!r} has {table.rows:,} rows; {_AGAIN}")
    return pa.concat_arrays(pieces)


def _read_buckets(path: pathlib.Path, table: Table, key_seed: int) -> np.ndarray:
    """(rows,) uint32, the row of each hash bucket.

    Raises:
      DatasetError: If the file cannot be read, or is not what the schema says for this seed.
    """
    try:
        row_of_bucket = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    numbering = _buckets_digest(row_of_bucket, key_seed)
    if row_of_bucket.shape != (table.rows,) or (table.numbering and numbering != table.numbering):
        raise DatasetError(
            f"{path} is not what the schema says for key seed {key_seed}; give the --key-seed of the preparation as"
            " key_seed, or copy the file again"
        )
    return row_of_bucket


def _read_keys(path: pathlib.Path, table: Table, key_seed: int) -> np.ndarray:
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
    for texts in _texts(path):
        yield LongTexts.among(*texts, key_seed)[1]


def _texts(path: pathlib.Path) -> Iterator[Spans]:
    """Pieces of the column of values."""
    import pyarrow as pa

    for batch in _batches(path, ["value"]):
        yield Spans.of(batch.column(0).fill_null("").cast(pa.large_string()))


def _buckets_digest(row_of_bucket: np.ndarray, key_seed: int) -> str:
    digest = hashlib.sha256(f"buckets, key seed {key_seed}\n".encode())
    digest.update(np.ascontiguousarray(row_of_bucket, "<u4").data)
    return digest.hexdigest()


def _save_vocabulary(path: pathlib.Path, built: Vocabulary, texts: TextStore | None) -> str:
    """Columns: value (string; null in the OOV row), row (uint32), count (int64). Returns the values' digest.

    The digest is of the values in the order of rows, whatever their counts, and whatever the hash of long ones.
    """
    lengths, values_digest = hashlib.sha256(), hashlib.sha256()
    import pyarrow as pa

    with _writer(path) as writer:
        for start in range(0, len(built.keys), _ROWS):
            keys = built.keys[start : start + _ROWS]
            ends, stored = texts.texts_of(keys) if texts else (np.empty(0, np.int64), np.empty(0, np.uint8))
            offsets, content = decode_keys(keys, ends, stored)
            valid = np.arange(start, start + len(keys)) != built.oov_row
            # Lengths and bytes apart: of bytes alone "ab", "c" would be "a", "bc".
            lengths.update(np.diff(offsets).astype("<i8").data)
            values_digest.update(content.tobytes())
            values = pa.LargeStringArray.from_buffers(
                len(keys), pa.py_buffer(offsets), pa.py_buffer(content.tobytes()), _bitmap(valid)
            ).cast(pa.string())
            rows = pa.array(np.arange(start, start + len(keys), dtype=np.uint32))
            counts = pa.array(built.counts[start : start + _ROWS])
            writer.write_table(pa.table([values, rows, counts], schema=writer.schema))
    return hashlib.sha256(b"vocabulary\n" + lengths.digest() + values_digest.digest()).hexdigest()


def _writer(path: pathlib.Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("value", pa.string()), ("row", pa.uint32()), ("count", pa.int64())])
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)


def _bitmap(valid: np.ndarray):
    import pyarrow as pa

    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
