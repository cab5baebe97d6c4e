"""Blocks: how examples lie in a shard.

A shard is an ArrayRecord file. One record is one block: an Arrow IPC stream that holds one record batch of up to
``block_size`` examples, one column a feature. Columns are ``label`` and dense features in float32, one-hot features in
the narrowest unsigned integer that holds ``rows - 1`` (keys of tables that grow in uint64), other categorical features
as lists of those, and their weights as lists of float32 under ``NAME:weight``. Of several labels ``label`` is the
first, and the others are columns of float32 called as their tasks; -1 is a label that is not known, of labels that are
numbers NaN. Weights of examples are float32 under ``label:weight``.

ArrayRecord tells damaged bytes, not that a record is another shard's. So each record ends in a tag, 16 bytes of the
SHA-256 of its stream, and the last record lists the tags of all blocks; the schema has the digest of that list. A block
that is read is known by its tag, without hashing it anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.data.columns import Column, ListColumn
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Shard
from jrec.optional_packages import explains_missing
from jrec.outputs import NewFile

if TYPE_CHECKING:
    import pyarrow as pa

type AnyColumn = Column | pa.Array | pa.ChunkedArray
"""A column in any form that ``ShardWriter`` takes."""

LABEL = "label"
WEIGHT_SUFFIX = ":weight"
EXAMPLE_WEIGHT = LABEL + WEIGHT_SUFFIX
"""The column of examples' weights; no feature can have the name."""

# One record a chunk, so that a block is read without its neighbours. zstd:1 shrinks Criteo-like blocks to 40 % at a
# third of a core per million examples/s of writing, a sixth of reading; higher levels and brotli gain under 2 %.
# Arrow IPC files (zstd:1, CRC-32 of a batch) would be as large and take 1.4 times the CPU of ArrayRecord to read
# Kaggle's 40 columns, 0.9 times that of DCNv2's 228: a frame a column costs what a parser less saves. With lz4 it would
# be 0.6 and 0.5 times, of 1.6 and 1.5 times the bytes.
_WRITE_OPTIONS = "group_size:1,zstd:1"
# ArrayRecord holds the GIL while it compresses (0.43 s a million examples), unlike Arrow; neither does to unpack. So
# where threads that also work in Python write side by side, Arrow compresses column by column: lz4 to 74 % takes 0.27 s
# and 0.08 s to unpack, where zstd:1 takes 0.5 s and 0.2 s to 48 %.
_WRITE_COMPRESSED, _COLUMNS_CODEC = "group_size:1,uncompressed", "lz4"
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_TAG_BYTES = 16
_LIST_MAGIC = b"jrec-blocks 1\n"
_ADVICE = "copy it again or prepare the dataset anew"


def id_dtype(rows: int) -> np.dtype:
    """The narrowest unsigned integer that holds the ids of a table of ``rows`` rows."""
    return np.dtype(np.min_scalar_type(max(rows - 1, 0)))


def weight_column(feature: CategoricalFeature) -> str | None:
    """The name of the column of the feature's weights, if it has any."""
    return f"{feature.name}{WEIGHT_SUFFIX}" if feature.weighted else None


def age_columns(schema: Schema) -> dict[str, int]:
    """The names of the columns of ages, and how many an example has at most."""
    return {f.name + WEIGHT_SUFFIX: f.max_length for f in schema.categorical if f.aged}


def label_columns(schema: Schema) -> tuple[str, ...]:
    """The columns of a block that no model reads, float32 all: of labels, and of examples' weights."""
    return (LABEL, *schema.tasks[1:], *([EXAMPLE_WEIGHT] if schema.weighted else []))


def known_labels(labels: np.ndarray, *, numeric: bool) -> np.ndarray:
    """(n,) bool: which of (n,) float32 labels are known, where examples have several; ``numeric`` ones are numbers."""
    return ~np.isnan(labels) if numeric else labels >= 0


def column_names(schema: Schema) -> list[str]:
    """All columns of a block, in order: labels, dense, each categorical feature followed by its weights."""
    names = [*label_columns(schema), *(f.name for f in schema.dense)]
    for feature in schema.categorical:
        names.append(feature.name)
        names.extend(filter(None, [weight_column(feature)]))
    return names


def shard_file(split: str, index: int, count: int) -> str:
    """The file name of shard ``index`` of ``count``."""
    return f"{split}-{index:05d}-of-{count:05d}.array_record"


def encode_block(batch: pa.RecordBatch, *, compress_columns: bool = False) -> bytes:
    """One record: an Arrow IPC stream of one batch, its columns compressed or not."""
    import pyarrow as pa

    options = pa.ipc.IpcWriteOptions(compression=_COLUMNS_CODEC if compress_columns else None, use_threads=False)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def decode_block(record: bytes) -> dict[str, Column]:
    """The columns of a record, read-only: views of its bytes where they are not compressed.

    Raises:
      ValueError: If the bytes are no such record.
    """
    import pyarrow as pa

    with pa.ipc.open_stream(record, options=pa.ipc.IpcReadOptions(use_threads=False)) as stream:
        batch = stream.read_next_batch()
    return {name: _to_numpy(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def _to_numpy(column: pa.Array) -> Column:
    import pyarrow as pa

    if not isinstance(column, pa.ListArray):
        return column.to_numpy()
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()[offsets[0] : offsets[-1]]
    return ListColumn(offsets - offsets[0] if offsets[0] else offsets, values)


def _to_arrow(name: str, column: Any) -> pa.Array:
    """Any accepted column as an Arrow array of a type that blocks hold."""
    import pyarrow as pa

    if isinstance(column, ListColumn):
        column = pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), pa.array(column.values))
    elif isinstance(column, np.ndarray):
        if column.ndim != 1:
            raise ValueError(f"column {name!r} has shape {column.shape}; a block takes one-dimensional columns")
        column = pa.array(column)
    elif isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    element = column.type.value_type if pa.types.is_list(column.type) else column.type
    if element not in (pa.float32(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        raise ValueError(f"column {name!r} is {column.type}; a block holds float32, unsigned integers or lists of them")
    if column.null_count or (pa.types.is_list(column.type) and column.flatten().null_count):
        raise ValueError(f"column {name!r} has nulls; give missing values an id of their own")
    return column


class ShardWriter:
    """Writes one shard, under ``PATH.partial`` until ``close``, so that a file called PATH is always whole.

    Example:
      >>> with ShardWriter(folder / "train-00000-of-00001.array_record", block_size=8192) as writer:
      ...     writer.write({"label": labels, "price": price, "user": users})
      >>> writer.shard
      Shard(file='train-00000-of-00001.array_record', ...)

    Leaving the ``with`` block by an exception removes the partial file.
    """

    @explains_missing
    def __init__(self, path: str | os.PathLike[str], block_size: int, *, compress_columns: bool = False):
        """Opens the file.

        Args:
          path: The shard.
          block_size: Examples a block.
          compress_columns: Whether columns are compressed one by one, without the GIL; readers take both.
        """
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least one example")
        self.path = pathlib.Path(path)
        self.block_size = block_size
        self.shard: Shard | None = None
        self._pending: pa.Table | None = None
        self._examples = 0
        self._tags: list[bytes] = []
        self._compress_columns = compress_columns
        options = _WRITE_COMPRESSED if compress_columns else _WRITE_OPTIONS
        self._file = NewFile(self.path)
        try:
            self._writer = array_record_module.ArrayRecordWriter(os.fspath(self._file.partial), options)
        except BaseException:
            self._file.abort()
            raise
        self._open = True

    @property
    def examples(self) -> int:
        """Examples given so far, written or waiting for a full block."""
        return self._examples + (self._pending.num_rows if self._pending is not None else 0)

    def write(self, columns: Mapping[str, AnyColumn]) -> None:
        """Appends examples, any number of them.

        Args:
          columns: NumPy or Arrow arrays (plain, list, chunked) or ``ListColumn``, all of equal length.

        Raises:
          ValueError: On nulls, unequal lengths, a type that blocks do not hold, or other columns than before.
          DatasetError: If the file cannot be written, e.g. because the disk is full.
        """
        import pyarrow as pa

        if not self._open:
            raise ValueError(f"{self.path} is closed")
        arrays = {name: _to_arrow(name, column) for name, column in columns.items()}
        if len({len(a) for a in arrays.values()}) != 1:
            lengths = ", ".join(f"{name}: {len(a)}" for name, a in arrays.items())
            raise ValueError(f"columns must be equally long, but have {lengths or 'no columns'}")
        table = pa.table(arrays)
        if self._pending is not None:
            if table.schema != self._pending.schema:
                raise ValueError(f"columns changed from ({_types(self._pending)}) to ({_types(table)})")
            # Without a copy: a block is put together when it is written.
            table = pa.concat_tables([self._pending, table])
        start = 0
        while table.num_rows - start >= self.block_size:
            self._write_block(table.slice(start, self.block_size))
            start += self.block_size
        self._pending = table.slice(start)

    def close(self) -> Shard:
        """Writes the last, possibly short block, makes the file durable and gives it its final name."""
        if self.shard is not None:
            return self.shard
        if not self._open:
            raise ValueError(f"{self.path} was aborted")
        try:
            if self._pending is not None and self._pending.num_rows:
                self._write_block(self._pending)
                self._pending = None
            tags = _LIST_MAGIC + b"".join(self._tags)
            with self._write_errors():
                self._writer.write(tags)
                self._writer.close()
            # Once the writer is closed, which writes its footer.
            size = self._file.partial.stat().st_size
            self._file.commit()
        except BaseException:
            self.abort()
            raise
        self._open = False
        self.shard = Shard(
            file=self.path.name,
            blocks=len(self._tags),
            examples=self._examples,
            bytes=size,
            digest=hashlib.sha256(tags).hexdigest(),
        )
        return self.shard

    def abort(self) -> None:
        """Gives up: removes what was written."""
        if self._open:
            self._open = False
            with contextlib.suppress(RuntimeError, ValueError):
                self._writer.close()
            self._file.abort()

    def _write_block(self, table: pa.Table) -> None:
        batch = table.combine_chunks().to_batches()[0]
        stream = encode_block(batch, compress_columns=self._compress_columns)
        tag = hashlib.sha256(stream).digest()[:_TAG_BYTES]
        with self._write_errors():
            self._writer.write(stream + tag)
        self._tags.append(tag)
        self._examples += batch.num_rows

    @contextlib.contextmanager
    def _write_errors(self):
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise DatasetError(f"cannot write {self.path}: {error}; make room or choose another folder") from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _types(table: pa.Table) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)


class ShardReader:
    """The blocks of one shard in any order, from any thread; opened at the first read, and again after unpickling."""

    def __init__(self, folder: str | os.PathLike[str], shard: Shard):
        self.path = pathlib.Path(folder) / shard.file
        self.shard = shard
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shard.blocks

    def read(self, block: int) -> dict[str, Column]:
        """The columns of a block; arrays are read-only.

        Raises:
          IndexError: If there is no such block.
          DatasetError: If the file is missing, truncated or damaged.
        """
        if not 0 <= block < len(self):
            raise IndexError(f"{self.path} has blocks 0 to {len(self) - 1}, not {block}")
        reader, tags = self._opened
        try:
            # ArrayRecord's reader may be shared by threads, and does not take the GIL to unpack.
            record = reader.read([block])[0]
            # ArrayRecord has checked the bytes; the tag says that they are this block's, not another shard's.
            if record[-_TAG_BYTES:] != tags[block * _TAG_BYTES : (block + 1) * _TAG_BYTES]:
                raise ValueError("it is another block")
            return decode_block(record)
        except (RuntimeError, ValueError, IndexError, StopIteration, OSError) as error:
            raise DatasetError(
                f"{self.path}, block {block} of {len(self)} cannot be read ({_first_line(error)}); the file is damaged:"
                f" {_ADVICE}"
            ) from error

    @functools.cached_property
    def _opened(self) -> tuple[Any, bytes]:
        """ArrayRecord's reader, and the tags of all blocks."""
        with self._lock:
            # Another thread may have opened it meanwhile: ``cached_property`` of Python 3.12 has no lock.
            if (opened := self.__dict__.get("_opened")) is None:
                opened = self.__dict__["_opened"] = self._open()
            return opened

    @explains_missing
    def _open(self) -> tuple[Any, bytes]:
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

        size = self.path.stat().st_size if self.path.is_file() else None
        if size != self.shard.bytes:
            fault = "is missing" if size is None else f"has {size:,} bytes where the schema says {self.shard.bytes:,}"
            raise DatasetError(f"{self.path} {fault}; {_ADVICE}")
        try:
            reader = array_record_module.ArrayRecordReader(os.fspath(self.path), _READ_OPTIONS)
            count = reader.num_records() if reader.ok() else 0
            content = reader.read([count - 1])[0] if count else b""
        except (RuntimeError, ValueError, IndexError, StopIteration, OSError) as error:
            raise DatasetError(
                f"{self.path} cannot be opened ({_first_line(error)}); the file is damaged: {_ADVICE}"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.shard.digest or not content.startswith(_LIST_MAGIC):
            raise DatasetError(
                f"{self.path} is not the shard that the schema names: its blocks have digest {digest[:8]}, not"
                f" {self.shard.digest[:8]}. It is damaged, or of another dataset or shard; {_ADVICE}"
            )
        if count != len(self) + 1:
            raise DatasetError(
                f"{self.path} holds {count - 1:,} blocks where the schema says {len(self):,}; the file is damaged:"
                f" {_ADVICE}"
            )
        return reader, content[len(_LIST_MAGIC) :]

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "shard": self.shard}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
