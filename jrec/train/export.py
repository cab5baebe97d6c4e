"""Writes a trained run for serving: the dense part as a program, rows as plain arrays, vocabularies; and deltas."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jrec.checkpoint.manifest import VALUES
from jrec.data.growing_tables import GrowingTables
from jrec.data.schema import Schema
from jrec.nn.tt_stack import TTStack
from jrec.ops.layout import EmbeddingLayout, TableConfig
from jrec.outputs import new_folder
from jrec.progress import Progress
from jrec.run.checkpoint import restore_state
from jrec.serving.checks import MAX_ROWS, check_order, difference, load_manifest, verify
from jrec.serving.format import (
    MODEL,
    ONNX,
    Dtype,
    ExportError,
    Feature,
    Manifest,
    Part,
    keys_file,
    save_manifest,
)
from jrec.serving.onnx import onnx_program
from jrec.serving.program import export_program
from jrec.serving.quantize import quantize
from jrec.serving.tables import ServedTables
from jrec.train.build import build_modules
from jrec.train.config.typed_toml import MOST
from jrec.train.evaluate import OpenedRun, open_run
from jrec.train.tables import vocabularies_of

_AT_ONCE = 1 << 16  # rows that are read, cast and written at once


def export_run(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    dtype: Dtype | None = None,
    since: Sequence[str | os.PathLike[str]] = (),
    onnx: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Manifest:
    """Writes a checkpoint's model for ``jrec.serving``; rows are read from the checkpoint's files in pieces.

    Args:
      checkpoint: A run folder, or one checkpoint in it.
      out: The folder to make; it appears when it is whole.
      data: The dataset, if it has moved since training; its vocabularies are copied.
      dtype: Of rows; "int8" and "int4" quantize each row. None for the tables' own, which must then be one.
        Tensor-train cores keep their dtype.
      since: An export and the deltas that follow it, in order: only rows that changed since then are written, as the
        next delta.
      onnx: Whether to write the dense part for onnxruntime, too.
      overwrite: Replaces an export at ``out``.
      progress: Shows how many rows are done; None shows nothing.
      report: Takes messages for the user.

    Returns:
      What was written.

    Raises:
      ExportError: If ``since`` is not an export and its deltas, or is of other tables, rows or another dtype.
      CheckpointError: If the checkpoint cannot be read.
      DatasetError: If the dataset cannot be used.
      OutputError: If ``out`` may not or cannot be written.
    """
    run = open_run(checkpoint, data)
    base = _Base([pathlib.Path(path) for path in since]) if since else None
    stored: Any = dtype or (base.dtype if base is not None else _own_dtype(run.layout))
    model, growing = _model(run)
    manifest = Manifest(
        id="",
        parent="" if base is None else base.manifests[-1].id,
        jrec=importlib.metadata.version("jrec"),
        run=run.config.name,
        step=run.saved.step,
        rows=run.trained_on.rows,
        dtype=stored,
        dense=tuple(feature.name for feature in run.schema.dense),
        features=_features(run.layout),
        tables={},
        files={},
    )
    if base is not None:
        base.check(manifest)
    about = {"command": "jrec export", "checkpoint": str(checkpoint)}
    read = [run.folder, run.config.data.path, *since]
    with new_folder(out, about, kind="export", overwrite=overwrite, inputs=read, report=report) as folder:
        (folder / "tables").mkdir()
        (folder / MODEL).write_bytes(export_program(model, run.layout, len(run.schema.dense)))
        if onnx:
            (folder / ONNX).write_bytes(onnx_program(model, run.layout, len(run.schema.dense)))
        writer = _Writer(run, folder, stored, base, model)
        total = sum(table.rows for _, table in _tables(run.layout) if table.tier != "tt")
        with (progress or Progress(False)).stage("export", max(total, 1)) as advance, run.reading():
            tables = writer.write(advance)
        manifest = dataclasses.replace(manifest, tables=tables)
        if base is None:
            _copy_vocabularies(run.schema, folder)
        else:
            base.check(manifest)
        for name, vocabulary in growing.now().items():
            (folder / "keys").mkdir(exist_ok=True)
            np.save(folder / keys_file(name), vocabulary.keys, allow_pickle=False)
        return save_manifest(folder, manifest)


def _own_dtype(layout: EmbeddingLayout) -> Any:
    dtypes = sorted({table.dtype for _, table in _tables(layout) if table.tier != "tt"}) or ["float32"]
    if len(dtypes) > 1:
        raise ExportError(f"the run's tables are of {' and '.join(dtypes)}; say which the export is of, by --dtype")
    return dtypes[0]


def _model(run: OpenedRun) -> tuple[Any, GrowingTables]:
    """The model with its dense parameters and cores, and the tables that grow; no row is read."""
    model, optimizer = build_modules(run.config, run.schema, run.layout, total_steps=MOST, abstract=True)
    graph, state = nnx.split((model, optimizer))
    growing = GrowingTables(run.layout, vocabularies_of(run.config, run.schema))
    with run.reading():
        state, progress = restore_state(run.saved, state, run.layout, rows=False)
        growing.restore(progress)
    return nnx.merge(graph, state)[0], growing


def _features(layout: EmbeddingLayout) -> tuple[Feature, ...]:
    return tuple(
        Feature(name=f.name, table=f.table, pooling=f.pooling, max_length=f.max_length, dim=dim, weighted=f.weighted)
        for f, dim in layout.features
    )


def _copy_vocabularies(schema: Schema, folder: pathlib.Path) -> None:
    """Copies what turns raw values into rows: the schema, vocabularies, hash buckets, bijections."""
    assert schema.folder is not None
    files = {table.vocabulary for table in schema.tables} | {f"buckets/{table.name}.npy" for table in schema.tables}
    files |= {table.bijection.file for table in schema.tables if table.bijection is not None}
    for file in sorted(file for file in files if file is not None and (schema.folder / file).is_file()):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(schema.folder / file, folder / file)
    schema.save(folder)


def _tables(layout: EmbeddingLayout) -> Iterator[tuple[str, TableConfig]]:
    """Stacks' names and tables, or parts of them, those of a table in the order of its rows."""
    parts = [(stack.name, table) for stack in layout.members for table in stack.tables]
    yield from sorted(parts, key=lambda part: (part[1].name, part[1].first_row))


class _Writer:
    """Writes the tables of a run to a folder."""

    def __init__(self, run: OpenedRun, folder: pathlib.Path, dtype: Dtype, base: _Base | None, model: Any):
        self._run, self._folder, self._dtype, self._base, self._model = run, folder, dtype, base, model

    def write(self, advance: Callable[[int], None]) -> dict[str, tuple[Part, ...]]:
        """Writes all tables; returns their parts."""
        tables: dict[str, tuple[Part, ...]] = {}
        done = 0
        for stack, table in _tables(self._run.layout):
            if table.table_rows > MAX_ROWS:
                raise ExportError(
                    f"table {table.name!r} has {table.table_rows:,} rows; serving reads up to {MAX_ROWS:,}"
                )
            if table.tier == "tt":
                part = self._cores(table, self._model.embeddings.tt[stack])
            else:
                part = self._rows(table, lambda rows, done=done: advance(done + rows))
                done += table.rows
            tables[table.name] = (*tables.get(table.name, ()), part)
        return tables

    def _path(self, table: TableConfig, kind: str) -> str:
        return f"tables/{table.name}{kind}.npy"

    def _cores(self, table: TableConfig, stack: TTStack) -> Part:
        shape = stack.shape
        files = [self._saved(self._path(table, f".core-{k}"), core) for k, core in enumerate(stack.arrays())]
        cached = {name: stack.cached[name].get_value() for name in stack.cached}
        return Part(
            first_row=table.first_row,
            rows=table.rows,
            dim=table.dim,
            dtype=str(stack.arrays()[0].dtype),
            cores=tuple(files),
            row_factors=shape.row_factors,
            dim_factors=shape.dim_factors,
            ranks=shape.ranks,
            **{f"cached_{name}": self._saved(self._path(table, f".cached-{name}"), a) for name, a in cached.items()},
        )

    def _saved(self, path: str, array: Any) -> str:
        np.save(self._folder / path, np.asarray(array), allow_pickle=False)
        return path

    def _rows(self, table: TableConfig, advance: Callable[[int], None]) -> Part:
        part = Part(
            first_row=table.first_row,
            rows=table.rows,
            dim=table.dim,
            dtype=self._dtype,
            file=self._path(table, ""),
            changed="" if self._base is None else self._path(table, ".changed"),
        )
        pieces = self._pieces(table, advance)
        if self._base is None:
            first = next(pieces)
            shape = (table.rows, *first.shape[1:])
            out = np.lib.format.open_memmap(self._folder / part.file, mode="w+", dtype=first.dtype, shape=shape)
            begin = 0
            while True:
                out[begin : begin + len(first)] = first
                begin += len(first)
                if (piece := next(pieces, None)) is None:
                    break
                first = piece
            out.flush()
            return part
        held, begin = self._base.tables.stored(table.name, part), 0
        numbers, values = [np.zeros(0, np.int64)], [held[:0]]
        for piece in pieces:
            before = held[begin : begin + len(piece)]
            same = (_bytes(piece) == _bytes(before)).all(axis=1)
            numbers.append(np.flatnonzero(~same) + begin)
            values.append(piece[~same])
            begin += len(piece)
        changed = np.concatenate(numbers)
        if changed.size * (changed.itemsize + held.itemsize * held[:1].size) < held.nbytes:
            self._saved(part.changed, changed)
            self._saved(part.file, np.concatenate(values))
            return part
        out = np.lib.format.open_memmap(self._folder / part.file, mode="w+", dtype=held.dtype, shape=held.shape)
        for begin in range(0, len(held), _AT_ONCE):
            out[begin : begin + _AT_ONCE] = held[begin : begin + _AT_ONCE]
        out[changed] = np.concatenate(values)
        out.flush()
        return dataclasses.replace(part, changed="")

    def _pieces(self, table: TableConfig, advance: Callable[[int], None]) -> Iterator[np.ndarray]:
        """A table's rows as they are exported, in order."""
        saved = self._run.saved.table(table.name)
        for begin in range(0, table.rows, _AT_ONCE):
            stop = min(begin + _AT_ONCE, table.rows)
            rows = saved.read(VALUES, np.arange(begin, stop) + table.first_row)
            if self._dtype in ("int8", "int4"):
                yield quantize(rows, int(self._dtype[3:]))
            else:
                yield np.asarray(rows, self._dtype if self._dtype != "bfloat16" else _bfloat16())
            advance(stop)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


class _Base:
    """What a delta follows: an export and deltas in order."""

    def __init__(self, folders: Sequence[pathlib.Path]):
        self.manifests = [load_manifest(folder) for folder in folders]
        for folder, manifest in zip(folders, self.manifests, strict=True):
            verify(folder, manifest)
        check_order(folders, self.manifests)
        self.tables = ServedTables.load(folders[0], self.manifests[0])
        for folder, manifest in zip(folders[1:], self.manifests[1:], strict=True):
            change = self.tables.change(folder, manifest)
            change.write()
            self.tables = change.tables
        self._folder, self.dtype = folders[0], self.manifests[0].dtype

    def check(self, manifest: Manifest) -> None:
        """Refuses a run that is not of the export's model; tables that are not known yet are its own."""
        first = self.manifests[0]
        whole = manifest if manifest.tables else dataclasses.replace(manifest, tables=first.tables)
        if (what := difference(first, whole)) is not None:
            raise ExportError(f"a delta of {self._folder} needs its model: {what}; make a whole export")
