"""Writes a table of rows as a folder of safetensors files, as its rows come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrec.outputs import Place, new_folder
from jrec.table_files.safetensors import DTYPES, SHARD_BYTES, ShardWriter, TensorSpec, check_specs
from jrec.table_files.scales import GREATEST, block_of, by_scale, quantized
from jrec.table_files.tables import CHUNK_ROWS, SCALE_DTYPES, StoredTable, TableFormat


def write_table(
    out: Place,
    read: Callable[[np.ndarray], np.ndarray],
    *,
    format: TableFormat | None = None,
    rows: int | None = None,
    dim: int | None = None,
    like: StoredTable | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_rows: int = CHUNK_ROWS,
) -> None:
    """Writes a table as a folder of safetensors files with an index, which appears whole or not at all.

      >>> rows = np.array([[1.0, 2.0], [3.0, 500.0]])
      >>> layout = TableFormat(name="embed.weight", dtype="float8_e4m3fn", scale="embed.scale", block=(1, 2))
      >>> write_table("trained", rows.__getitem__, format=layout, rows=2, dim=2)
      >>> StoredTable(jrec.table_files.Tensors("trained"), "embed.weight").read([0, 1]).tolist()
      [[1.0, 2.0], [3.0, 512.0]]

    With ``like`` instead of format, rows and dim, the table is written as that one lies. Rows that ``read`` returns as
    they were keep their bytes, their scales' included, whatever dtype they had in between. Where several rows
    share a scale, all of them have to be as they were: a row that grew takes a greater scale for its neighbours, too.

    Args:
      out: The folder, which is not there or empty.
      read: Returns rows by their numbers, ascending: (n,) int64 to (n, dim) floats, such as
        ``lambda ids: run.rows("ngram", ids)``. Floats are rounded to the nearest.
      format: How the table lies in the files.
      rows: Rows of the table.
      dim: Elements of a row.
      like: The table as it was read.
      shard_bytes: A file of this many bytes takes no further tensor.
      chunk_rows: Rows that are in memory at once.

    Raises:
      ValueError: If both, or neither, of ``like`` and the three others are there, what ``read`` returns is no such
        array, or not finite where it takes scales, or the blocks' scales are as many as those of another block.
      CheckpointError: If ``like`` lies as no table can be written.
      OutputError: If the folder cannot be written, holds something, or holds ``like``.
    """
    twice = like is not None and not (format is None and rows is None and dim is None)
    if like is not None:
        format, rows, dim = like.format, like.rows, like.dim
    if twice or format is None or rows is None or dim is None or min(rows, dim) < 1:
        raise ValueError("give format, rows and dim of the table to write, or like, the table that it was")
    specs = _specs(format, rows, dim)
    check_specs(specs)
    if like is None:
        _check_block(format, rows, dim)
    inputs = [] if like is None else like.files
    scale = single_scale(format, read, like, rows, chunk_rows)
    with new_folder(out, {"table": format.name}, kind="folder of tensors", inputs=inputs) as folder:
        writer = ShardWriter(folder, specs, shard_bytes=shard_bytes)
        for piece, first, ids in _chunks(format, rows, chunk_rows):
            current = checked_rows(read, ids, dim)
            if like is None:
                values, scales = encoded(format, current, scale, ids)
            else:
                values, scales = _updated(like, format, current, scale, ids)
            writer.write(format.name.replace("{}", str(piece)), first, values)
            if scales is not None:
                writer.write(format.scale.replace("{}", str(piece)), first // format.height, scales)
        if scale is not None:
            writer.write(format.scale, 0, scale)
        writer.finish()


def checked_rows(read: Callable[[np.ndarray], np.ndarray], ids: np.ndarray, dim: int) -> np.ndarray:
    """What a function returns for row numbers, (n, dim) floats; raises ValueError where it is no such array."""
    rows = np.asarray(read(ids))
    if rows.shape != (ids.size, dim) or rows.dtype.kind not in "fiV":
        raise ValueError(
            f"rows to write are {rows.dtype} of shape {rows.shape}; read must return floats of shape"
            f" ({ids.size}, {dim})"
        )
    return rows


def _chunks(format: TableFormat, rows: int, chunk_rows: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Rows that are written at once: their piece, the first of them in it, and their numbers in the table."""
    piece_rows = format.piece_rows or rows
    step = max(chunk_rows // format.height, 1) * format.height
    for piece, begin in enumerate(range(0, rows, piece_rows)):
        stop = min(begin + piece_rows, rows)
        for first in range(begin, stop, step):
            yield piece, first - begin, np.arange(first, min(first + step, stop))


def _specs(format: TableFormat, rows: int, dim: int) -> list[TensorSpec]:
    """The tensors of a table, piece by piece."""
    specs, piece_rows = list[TensorSpec](), format.piece_rows or rows
    for number, begin in enumerate(range(0, rows, piece_rows)):
        size = min(piece_rows, rows - begin)
        name = format.name.replace("{}", str(number))
        specs.append(TensorSpec(name=name, dtype=dtype_of(format.dtype), shape=(size, dim)))
        if format.scale and format.block is not None:
            blocks = -(-size // format.block[0]), -(-dim // format.block[1])
            name = format.scale.replace("{}", str(number))
            specs.append(TensorSpec(name=name, dtype=_scale_dtype(format), shape=blocks))
    if format.scale and format.block is None:
        specs.append(TensorSpec(name=format.scale, dtype=_scale_dtype(format), shape=(1,)))
    return specs


def _check_block(format: TableFormat, rows: int, dim: int) -> None:
    """Refuses a block that whoever reads the table takes for another one, since files have only the shapes.

    Where the shapes leave it open, reading asks for the block.
    """
    if not format.scale or format.block is None:
        return
    height, width = format.block
    for size in {min(format.piece_rows or rows, rows), (rows - 1) % (format.piece_rows or rows) + 1}:
        try:
            taken = block_of((size, dim), (-(-size // height), -(-dim // width)))
        except ValueError:
            continue
        if taken != (min(height, size), min(width, dim)):
            raise ValueError(
                f"block={format.block} of {size:,} rows of {dim} elements: the scales are as many as of block={taken},"
                " which readers would take it for; choose sizes that divide rows and elements, or 32 or 128"
            )


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, such as "bfloat16"."""
    return next(dtype for dtype in DTYPES.values() if dtype.name == name)


def _scale_dtype(format: TableFormat) -> np.dtype[Any]:
    return dtype_of(format.scale_dtype or ("float32" if format.block is None else SCALE_DTYPES[format.dtype][0]))


def single_scale(
    format: TableFormat,
    read: Callable[[np.ndarray], np.ndarray],
    like: StoredTable | None,
    rows: int,
    chunk_rows: int,
) -> np.ndarray | None:
    """The scale of a whole table, (1,): the one that it had, or by its greatest value, for which all rows are read."""
    if not format.scale or format.block is not None:
        return None
    if like is not None and like.single_scale is not None:
        return np.array([like.single_scale], _scale_dtype(format))
    most = max(float(np.abs(read(ids).astype(np.float32)).max()) for _, _, ids in _chunks(format, rows, chunk_rows))
    scale = np.array([most / GREATEST[format.dtype] or 1], np.float32)
    rounded = scale.astype(_scale_dtype(format))
    # A scale that was rounded down would leave no room for the greatest value.
    return rounded if rounded >= scale else (scale * np.float32(1.01)).astype(rounded.dtype)


def encoded(
    format: TableFormat, rows: np.ndarray, scale: np.ndarray | None, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows as a format stores them, with the scales of their blocks."""
    if not format.scale:
        return rows.astype(dtype_of(format.dtype)), None
    if scale is not None:
        return by_scale(rows, format.dtype, float(scale[0]), ids), None
    values, scales = quantized(rows, format.dtype, format.block or (1, 1))
    return values, scales.view(np.uint8) if format.scale_dtype == "uint8" else scales.astype(_scale_dtype(format))


def _updated(
    like: StoredTable, format: TableFormat, rows: np.ndarray, scale: np.ndarray | None, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Stored values and scales, in which the blocks that have a changed row are encoded anew."""
    # Chunks are whole blocks (``_chunks``), so that no block is encoded in two parts by two scales.
    stored, begins = like.stored(ids), np.arange(0, ids.size, format.height)
    changed = ~np.logical_and.reduceat(unchanged(like, rows, ids) & stored.encoded, begins)
    within = np.repeat(changed, format.height)[: ids.size]
    scales = None if stored.scales is None or scale is not None else stored.scales[begins]
    if changed.any():
        # Whole blocks: only the last one may be smaller, and it stays the last.
        stored.values[within], new_scales = encoded(format, rows[within], scale, ids[within])
        if scales is not None and new_scales is not None:
            scales[changed] = new_scales
    return stored.values, scales


def unchanged(like: StoredTable, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which rows are as they were read, (n,) bool: one that no step touched is the stored one in the run's dtype."""
    return (like.read(ids).astype(rows.dtype) == rows).all(axis=1)
