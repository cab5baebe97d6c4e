"""Writes the rows of a table that changed as one small file, which lies over the table's own files."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from jrec.outputs import Place, new_file
from jrec.table_files.overlay_file import KIND, UNSEALED, VERSION, checksum_of, digest_of_rows
from jrec.table_files.safetensors import TensorSpec, header_of
from jrec.table_files.tables import CHUNK_ROWS, FLOATS, StoredTable, pieces_of
from jrec.table_files.write import checked_rows, dtype_of, encoded, single_scale, unchanged

Changed = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Row numbers, their values as they are stored, and their scales."""


def write_overlay(
    out: Place,
    rows: Callable[[np.ndarray], np.ndarray] | np.ndarray,
    *,
    like: StoredTable,
    ids: np.ndarray | None = None,
    dtype: str | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> int:
    """Writes the rows that changed as a file to lie over a table, whose files stay as they are.

      >>> jrec.table_files.write_tensors("engram", {"embed.weight": np.zeros((9, 2), np.float32)})
      >>> table = StoredTable(jrec.table_files.Tensors("engram"), "embed.weight")
      >>> write_overlay("edit.safetensors", np.array([[1.0, 2.0], [0.0, 0.0]]), ids=np.array([7, 3]), like=table)
      1
      >>> edited = StoredTable(jrec.table_files.Tensors("engram"), "embed.weight", overlays=["edit.safetensors"])
      >>> edited.read([3, 7]).tolist(), edited.overlaid.tolist()
      ([[0.0, 0.0], [1.0, 2.0]], [7])

    A row is in it where its stored bytes, or its scales', are to change. Without the file the table is what it
    was; ``write_table("merged", edited.read, like=edited)`` makes files of both, in which all other rows keep their
    bytes, but for those that share a scale with a row that an overlay has as floats. The file fits only this table, and
    only while the rows that it replaces are as they are in ``like``.

    Args:
      out: The file, which is not there.
      rows: Returns rows by their numbers, as for ``write_table``: ``lambda ids: run.rows("ngram", ids)``; or, with
        ``ids``, their rows, (n, dim) floats.
      like: The table as it was read, with the overlays, if any, that this one is to follow.
      ids: (n,) integers, each once: the only rows that may have changed. None looks at all rows.
      dtype: "float32", "bfloat16" or "float16" to have the rows as such floats; None as the table's files have them,
        in 8 bits with new scales, or with the table's one scale.
      chunk_rows: Rows that are in memory at once.

    Returns:
      How many rows the file holds. While it is written, their numbers and scales are in memory.

    Raises:
      ValueError: If ``dtype`` is another one, ``ids`` are no rows or one is there twice, ``rows`` are no such array, or
        are not finite as they are stored.
      CheckpointError: If the rows are to be as in files that ``write_table`` does not write.
      OutputError: If the file is there, is one of the table's, or cannot be written.
    """
    if dtype not in (None, *FLOATS):
        raise ValueError(
            f"dtype={dtype!r} of an overlay; choose one of {', '.join(FLOATS)}, or None for the table's own"
        )
    if ids is not None:
        ids = _checked(ids, like)
    if not callable(rows):
        if ids is None:
            raise ValueError(f"rows are an array of shape {rows.shape}; say by ids which rows of {like.name} they are")
        rows = _given(rows, ids, like)
    ids = None if ids is None else np.sort(ids)
    if dtype is None:
        changes = _encoded_changes(rows, like, ids, chunk_rows)
    else:
        changes = _float_changes(rows, like, ids, chunk_rows, dtype)
    with new_file(out, overwrite=False, inputs=like.files) as partial:
        return _write(partial, like, changes)


def _write(path: pathlib.Path, like: StoredTable, changes: Iterator[Changed]) -> int:
    """Writes values as they come, then their numbers and scales, and the header, whose place was left free."""
    first = next(changes)  # may be empty
    all_ids, all_scales, row = list[np.ndarray](), list[np.ndarray](), first[1].shape[1:]
    says = {"kind": KIND, "overlay_version": VERSION, "table": like.name, "base": like.fingerprint, "sha256": UNSEALED}

    def header(count: int, before: str, size: int = 0) -> bytes:
        specs = [
            TensorSpec(name="values", dtype=first[1].dtype, shape=(count, *row)),
            TensorSpec(name="ids", dtype=np.dtype(np.int64), shape=(count,)),
        ]
        if first[2] is not None:
            specs.append(TensorSpec(name="scales", dtype=first[2].dtype, shape=(count, *first[2].shape[1:])))
        return header_of(specs, {**says, "before": before}, size=size)

    size = len(header(like.rows, UNSEALED))  # of no more rows: the longest
    with path.open("r+b") as file:
        file.seek(size)
        for ids, values, scales in itertools.chain([first], changes):
            _append(file, values)
            all_ids.append(ids)
            all_scales += [] if scales is None else [scales]
        ids = np.concatenate(all_ids)
        _append(file, ids)
        for scales in all_scales:
            _append(file, scales)
        file.seek(0)
        whole = header(ids.size, digest_of_rows(like.read(some) for some in pieces_of(ids)), size)
        file.write(whole)
        file.flush()
        # Of the whole file with zeros in the checksum's place, which has the same length: nothing moves when it is
        # filled in.
        checksum = checksum_of(np.memmap(path, np.uint8, mode="r"), UNSEALED)
        file.seek(0)
        file.write(whole.replace(UNSEALED.encode(), checksum.encode()))
    return ids.size


def _append(file: BinaryIO, array: np.ndarray) -> None:
    file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _checked(ids: np.ndarray, like: StoredTable) -> np.ndarray:
    """Row numbers, (n,) int64, as they were given."""
    ids = np.asarray(ids, None if np.size(ids) else np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"ids must be integers of shape (n,), but are {ids.dtype} of shape {ids.shape}")
    ids = ids.astype(np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < like.rows:
        worst = ids[(ids < 0) | (ids >= like.rows)][0]
        raise ValueError(f"{like.name} has no row {worst}; its rows are 0 to {like.rows - 1:,}")
    ordered = np.sort(ids)
    if (twice := ordered[1:] == ordered[:-1]).any():
        raise ValueError(f"row {ordered[1:][twice][0]} of {like.name} is given twice")
    return ids


def _given(rows: np.ndarray, ids: np.ndarray, like: StoredTable) -> Callable[[np.ndarray], np.ndarray]:
    """A function that returns the rows that were given, and, of others that share a scale with them, the table's."""
    rows, order = np.asarray(rows), np.argsort(ids)
    if rows.shape != (ids.size, like.dim) or rows.dtype.kind not in "fiV":
        raise ValueError(
            f"rows are {rows.dtype} of shape {rows.shape}; give floats of shape ({ids.size}, {like.dim}), a row for"
            " each id"
        )
    ordered, values = ids[order], rows[order].astype(np.float32)

    def read(numbers: np.ndarray) -> np.ndarray:
        out = like.read(numbers).astype(np.float32)
        here = np.flatnonzero(np.isin(numbers, ordered, assume_unique=True))
        out[here] = values[np.searchsorted(ordered, numbers[here])]
        return out

    return read


def _blocks(ids: np.ndarray | None, rows: int, height: int, chunk_rows: int) -> Iterator[np.ndarray]:
    """All rows of the blocks that hold some rows, or of all blocks, some at a time; at least once, though of none."""
    blocks = range(-(-rows // height)) if ids is None else np.unique(ids // height)
    step = max(chunk_rows // height, 1)
    for begin in range(0, max(len(blocks), 1), step):
        numbers = np.asarray(blocks[begin : begin + step], np.int64)[:, None] * height + np.arange(height)
        yield numbers[numbers < rows]


def _float_changes(
    rows: Callable[[np.ndarray], np.ndarray], like: StoredTable, ids: np.ndarray | None, chunk_rows: int, dtype: str
) -> Iterator[Changed]:
    for numbers in _blocks(ids, like.rows, 1, chunk_rows):
        current, stored = checked_rows(rows, numbers, like.dim), like.read(numbers)
        with np.errstate(over="ignore"):
            values = current.astype(dtype_of(dtype))
        _check_finite(values, numbers, dtype)
        changed = ~unchanged(like, current, numbers) & (values.astype(np.float32) != stored).any(axis=1)
        yield numbers[changed], values[changed], None


def _encoded_changes(
    rows: Callable[[np.ndarray], np.ndarray], like: StoredTable, ids: np.ndarray | None, chunk_rows: int
) -> Iterator[Changed]:
    layout = like.format
    scale = single_scale(layout, rows, like, like.rows, chunk_rows)
    for numbers in _blocks(ids, like.rows, layout.height, chunk_rows):
        current, stored = checked_rows(rows, numbers, like.dim), like.stored(numbers)
        _check_finite(current, numbers, str(current.dtype))
        blocks = numbers // layout.height
        # Rows that share a scale are encoded together, whichever of them changed.
        within = np.isin(blocks, blocks[~unchanged(like, current, numbers)])
        values, scales = encoded(layout, current[within], scale, numbers[within])
        # A row that an overlay below has as floats differs from any encoded one, even where both stand for the same.
        changed = ~stored.encoded[within] | _differ(values, stored.values[within])
        if scales is not None and stored.scales is not None:
            # The scales of each row: those of its block.
            scales = np.repeat(scales, layout.height, axis=0)[: within.sum()]
            changed |= _differ(scales, stored.scales[within])
            scales = scales[changed]
        yield numbers[within][changed], values[changed], scales


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Which rows have other bytes, (n,) bool."""
    one, other = (np.ascontiguousarray(array).view(np.uint8) for array in (one, other))
    return (one != other).any(axis=1)


def _check_finite(rows: np.ndarray, ids: np.ndarray, dtype: str) -> None:
    finite = np.isfinite(rows.astype(np.float32)).all(axis=1)
    if not finite.all():
        raise ValueError(f"row {ids[~finite][0]} is not finite in {dtype}; did the run diverge?")
