"""What a dataset keeps of a table: ``counts/TABLE.npy``, ``vocabulary/TABLE.parquet`` or ``buckets/TABLE.npy``."""

from __future__ import annotations

import concurrent.futures
import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np

from jrec.data.readers.keys import decode_keys
from jrec.data.readers.parquet import read_batches
from jrec.data.schema import Table
from jrec.data.texts import TextStore
from jrec.data.vocabulary import HashedTable, KeyTable, Vocabulary
from jrec.files import sha256_of

_ROWS = 1 << 17


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
        np.save(folder / "buckets" / f"{name}.npy", built.row_of_bucket, allow_pickle=False)
        digest = hashlib.sha256(f"buckets, key seed {key_seed}\n".encode())
        digest.update(np.ascontiguousarray(built.row_of_bucket, "<u4").data)
        return Table(name=name, rows=len(built.counts), counts=counts, numbering=digest.hexdigest())
    vocabulary = f"vocabulary/{name}.parquet"
    numbering = _save_vocabulary(folder / vocabulary, built, texts)
    return Table(
        name=name,
        rows=len(built.counts),
        oov_row=built.oov_row,
        counts=counts,
        vocabulary=vocabulary,
        numbering=numbering,
    )


def copy_vocabulary(source: pathlib.Path, target: pathlib.Path, counts: np.ndarray) -> None:
    """Copies a vocabulary with other counts, (rows,) int64."""
    import pyarrow as pa

    remedy = "copy it again, or prepare the dataset again"
    with _writer(target) as writer:
        at = 0
        for batch in read_batches(source, ["value", "row"], _ROWS, remedy=remedy):
            stop = at + batch.num_rows
            writer.write_table(pa.table([*batch.columns, pa.array(counts[at:stop])], schema=writer.schema))
            at = stop


def file_digests(folder: pathlib.Path, tables: Sequence[Table], threads: int) -> dict[str, str]:
    """SHA-256 of the files that tables name, by path relative to the folder; reads ``threads`` of them at once."""
    files = [file for t in tables for file in (t.counts, t.vocabulary) if file is not None]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return dict(zip(files, pool.map(lambda file: sha256_of(folder / file), files), strict=True))


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
