"""Compresses trained tables into tensor trains: turns a run's checkpoint into a run with compressed tables."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrec.app.build import build_modules
from jrec.app.config import TrainConfig
from jrec.app.config.typed_toml import MOST
from jrec.app.evaluate import OpenedRun, open_run, restore_run
from jrec.app.report.ranking import AnyScores, has_examples
from jrec.app.run_folder import new_run_folder
from jrec.app.run_record import TrainedRun, run_at
from jrec.app.tables import in_cores, train_override
from jrec.checkpoint import Checkpoints, CopiedRows
from jrec.checkpoint.manifest import VALUES
from jrec.checkpoint.saved import SavedTable
from jrec.checkpoint.settled import SETTLED
from jrec.data.schema import Schema
from jrec.errors import ConfigError, value_errors_are_config_errors
from jrec.json_values import JsonObject
from jrec.ops.layout import EmbeddingLayout, TableConfig
from jrec.ops.tt import TTDecomposition, TTShape, tt_dense_chunks, tt_svd
from jrec.ops.tt.shape import MAX_ROWS
from jrec.outputs import CHECKPOINTS, check_output, new_folder
from jrec.progress import Progress
from jrec.run.checkpoint import FRESH, core_arrays, dense_arrays
from jrec.run.identity import identity_in, meta_of
from jrec.run.step import compile_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which uncompressed tables to compress, and how far.

    Attributes:
      rank: The rank between neighbouring cores; None where only ``relative_error`` decides.
      relative_error: Takes the least ranks whose product is within this fraction of the table's Frobenius norm, none
        above ``rank`` where that is given.
      cores: Cores per table.
      largest: How many of the largest tables are compressed.
      min_rows: The least number of rows of a table that is compressed; 0 compresses none by size.
      tables: Names of tables to compress.
      whole_rows: The number of first, and so most frequent, rows of every table that stay uncompressed.
    """

    rank: int | None = None
    relative_error: float | None = None
    cores: int = 3
    largest: int = 0
    min_rows: int = 0
    tables: tuple[str, ...] = ()
    whole_rows: int = 0

    def __post_init__(self) -> None:
        if self.rank is None and self.relative_error is None:
            raise ConfigError("give --rank, --relative-error, or both")
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"--rank is {self.rank}; it must be at least 1")
        if self.relative_error is not None and not 0 <= self.relative_error < 1:
            raise ConfigError(f"--relative-error is {self.relative_error}; it must be in [0, 1)")
        for name in ("largest", "min_rows", "whole_rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 0")
        if not (self.largest or self.min_rows or self.tables):
            raise ConfigError("say which tables: --largest K, --min-rows N or --tables A,B")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedTable:
    """A table's compression.

    Attributes:
      rows, dim: The table's shape.
      shape: The shape of the tensor train of all compressed rows; None where the table stays uncompressed, for the
        reason in ``note``.
      cores: The cores of that train, of equal scale and in their stored dtype.
      relative_error: Frobenius norm of (rows - their stored train), divided by the Frobenius norm of these rows.
      note: How the compression differs from the selection.
    """

    rows: int
    dim: int
    shape: TTShape | None = None
    cores: tuple[jax.Array, ...] = ()
    relative_error: float = 0.0
    note: str = ""

    @property
    def whole_rows(self) -> int:
        """How many first rows stay uncompressed beside a tensor train of the others."""
        return 0 if self.shape is None else self.rows - self.shape.rows

    @property
    def parameters(self) -> int:
        """The number of stored elements."""
        train = 0 if self.shape is None else self.shape.num_parameters
        return train + (self.rows if self.shape is None else self.whole_rows) * self.dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """A compressed run: its tables, and scores before and after by split."""

    run: OpenedRun
    tables: dict[str, CompressedTable]
    before: dict[str, AnyScores]
    after: dict[str, AnyScores]


def compress_run(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    selection: Selection,
    *,
    data: str | os.PathLike[str] | None = None,
    splits: Sequence[str] = ("valid", "test"),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Compression:
    """Compresses tables of a trained run by TT-SVD, and writes the result as a run, or only as checkpoints.

    Dense parameters, their optimizer, the other tables and their slots do not change; slots of cores begin fresh.
    Tables are read from the checkpoint's files, and copied to the new one's, in pieces, whatever their tier. So memory
    holds as much as ``tt_svd`` needs for one table or, while a model is scored, as much as ``jrec eval``.

    Args:
      checkpoint: A run folder, a folder of ``Run.save``, or one checkpoint in either.
      out: The new folder: of a run, for ``jrec train --resume`` too, or of a checkpoint, for ``Run.restore`` too.
      selection: Which tables to compress, and how far.
      data: The dataset, if it has moved since training.
      splits: The splits to score before and after; those without examples are left out.
      overwrite: Replaces an existing run in ``out``.
      progress: Shows how many rows are done; None shows nothing.

    Raises:
      ConfigError: If tables cannot be compressed as selected, or ``out`` holds a run.
      CheckpointError: If the checkpoint cannot be read or written.
    """
    out = pathlib.Path(out)
    check_output(out, inputs=[checkpoint, *([] if data is None else [data])])
    if run_at(out) is not None and not overwrite:
        raise ConfigError(f"{out} holds a run already; replace it with --overwrite, or choose another --out")
    run = open_run(checkpoint, data)
    run.schema.check_numbered("`jrec compress` gives rows common cores")
    selected = _selected(run, selection)
    tables, rows = {}, 0
    with (progress or Progress(False)).stage("compress", sum(t.rows for t in selected)) as advance, run.advising():
        for table in selected:
            tables[table.name] = _decompose(run, table, selection)
            rows += table.rows
            advance(rows)
    if not any(table.cores for table in tables.values()):
        raise ConfigError("no table was compressed: " + "; ".join(f"{n}: {t.note}" for n, t in tables.items()))
    splits = run.schema.with_examples(splits)
    before = _scores(run.saved.folder, data, splits)
    _write(run, out, data, tables, overwrite=overwrite)
    return Compression(run=open_run(out), tables=tables, before=before, after=_scores(out, None, splits))


def _scores(
    checkpoint: str | os.PathLike[str], data: str | os.PathLike[str] | None, splits: Sequence[str]
) -> dict[str, AnyScores]:
    """A checkpoint's scores by split, of those with the first label; its model takes memory only here."""
    if not splits:
        return {}
    run = restore_run(checkpoint, data)
    return {split: scores for split in splits if has_examples(scores := run.scores(split))}


def _selected(run: OpenedRun, selection: Selection) -> list[TableConfig]:
    parts = [t for stack in run.layout.members for t in stack.tables]
    tables = {t.name: t for t in sorted(parts, key=lambda t: t.tier == "tt")}  # of parts, the cores
    whole = {name: t for name, t in tables.items() if t.tier != "tt"}
    for name in selection.tables:
        if name not in tables:
            raise ConfigError(f"--tables: the run has no table {name!r}, only {', '.join(tables)}")
        if name not in whole:
            raise ConfigError(f"--tables: {name} is of tier {tables[name].tier!r}; only whole tables are compressed")
    exact = run.saved.manifest.meta.get(SETTLED, {})
    if named := [name for name in selection.tables if name in exact]:
        raise ConfigError(
            f"--tables: {named[0]} is trained by {exact[named[0]]['name']!r}, but the slices of a tensor train by lazy"
            " optimizers only; train the table by one of them"
        )
    whole = {name: t for name, t in whole.items() if name not in exact}
    largest = sorted(whole.values(), key=lambda t: -t.rows)[: selection.largest]
    chosen = {t.name for t in largest} | set(selection.tables)
    chosen |= {name for name, t in whole.items() if selection.min_rows and t.rows >= selection.min_rows}
    if small := [name for name in selection.tables if tables[name].rows <= selection.whole_rows]:
        raise ConfigError(
            f"--whole-rows is {selection.whole_rows:,}, but table {small[0]} has {tables[small[0]].rows:,} rows, so"
            " that none are left for cores"
        )
    if not chosen:
        raise ConfigError(
            f"--min-rows {selection.min_rows:,} selects no table; the largest has"
            f" {max((t.rows for t in whole.values()), default=0):,} rows"
        )
    return [t for t in whole.values() if t.name in chosen]


def _decompose(run: OpenedRun, table: TableConfig, selection: Selection) -> CompressedTable:
    described = CompressedTable(rows=table.rows, dim=table.dim)
    if table.rows <= selection.whole_rows:
        why = f"stays whole: --whole-rows is {selection.whole_rows:,}, and it has {table.rows:,} rows"
        return dataclasses.replace(described, note=why)
    if (compressed := table.rows - selection.whole_rows) > MAX_ROWS:
        why = f"has {compressed:,} rows to compress, but a tensor train has up to {MAX_ROWS:,}; raise --whole-rows"
        if table.name in selection.tables:
            raise ConfigError(f"--tables: {table.name} {why}")
        return dataclasses.replace(described, note=f"stays whole: {why}")
    shape = TTShape.search(compressed, table.dim, num_cores=selection.cores, ranks=1)
    ranks, note = shape.ranks, ""
    if selection.rank is not None:
        ranks = tuple(min(selection.rank, bound) for bound in shape.max_ranks)
        if min(ranks) < selection.rank and selection.relative_error is None:
            if table.name in selection.tables:
                with value_errors_are_config_errors(f"--rank {selection.rank} for table {table.name}"):
                    shape.with_ranks(selection.rank)
            note = f"ranks capped at {list(ranks)}; higher ranks add nothing"
    rows = _SavedRows(run.saved.table(table.name), selection.whole_rows)
    with value_errors_are_config_errors(f"table {table.name}"):
        train = tt_svd(rows, shape.with_ranks(ranks), relative_error=selection.relative_error)
        limited = tuple(min(pair) for pair in zip(train.shape.ranks, ranks, strict=True))
        if selection.rank is not None and limited != train.shape.ranks:
            train = tt_svd(rows, shape.with_ranks(limited))
            note = f"ranks {list(limited)} by --rank; the error asked for would need more"
    if train.shape.num_parameters >= compressed * table.dim:
        subject = f"its rows from {selection.whole_rows:,} on have" if selection.whole_rows else "the table has"
        why = (
            f"stays whole: cores of ranks {list(train.shape.ranks)} would have {train.shape.num_parameters:,}"
            f" elements, {subject} {compressed * table.dim:,}"
        )
        return dataclasses.replace(described, note=why)
    dtype = run.config.tables.tt.dtype or table.dtype
    if dtype == "float16":
        advice = "; set tables.tt.dtype" if run.record.made is None else ""
        raise ConfigError(f"table {table.name} is float16, but cores are float32 or bfloat16{advice}")
    cores = tuple(jnp.asarray(core, dtype) for core in _balanced(train))
    error = _error(rows, cores, train.shape)
    return dataclasses.replace(described, shape=train.shape, cores=cores, note=note, relative_error=error)


class _SavedRows:
    """The rows of a checkpoint's table from ``first`` on, each slice read at its use; see ``tt_svd``."""

    def __init__(self, table: SavedTable, first: int):
        self._table, self._first = table, first
        self.shape = (table.record.shape.rows - first, table.record.shape.dim)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._table.read(VALUES, np.arange(rows.start, rows.stop) + self._first)


def _balanced(train: TTDecomposition) -> list[np.ndarray]:
    """The cores, scaled to one root mean square without changing their product, as optimizers want them."""
    scales = [math.sqrt(float(np.mean(np.square(core)))) for core in train.cores]
    if not all(scales):
        return list(train.cores)
    # The geometric mean, by which the product of all factors is 1.
    common = math.exp(math.fsum(map(math.log, scales)) / len(scales))
    return [core * np.float32(common / scale) for core, scale in zip(train.cores, scales, strict=True)]


def _error(rows: _SavedRows, cores: Sequence[jax.Array], shape: TTShape) -> float:
    squares, lost, begin = 0.0, 0.0, 0
    for chunk in tt_dense_chunks(cores, shape):
        wanted = rows[begin : begin + len(chunk)].astype(np.float64)
        squares += float(np.sum(np.square(wanted)))
        lost += float(np.sum(np.square(wanted - chunk)))
        begin += len(chunk)
    return math.sqrt(lost / squares) if squares else 0.0


def _write(
    run: OpenedRun,
    out: pathlib.Path,
    data: str | os.PathLike[str] | None,
    compressed: Mapping[str, CompressedTable],
    *,
    overwrite: bool,
) -> None:
    """Writes a folder like the run's: dense arrays and cores, and unchanged the rows of all other tables."""
    layout = _layout(run, compressed)
    uncompressed = {t.name: t.rows for stack in layout.members for t in stack.tables if not stack.compressed}
    with run.advising():
        learned = run.saved.arrays()
    trains = {name: table.cores for name, table in compressed.items() if table.cores}
    for name, cores in trains.items():
        learned |= {path: np.asarray(core) for path, core in core_arrays(layout, name, cores).items()}
    meta: JsonObject = {"meta": meta_of(run.saved)}
    if SETTLED in run.saved.manifest.meta:
        meta[SETTLED] = run.saved.manifest.meta[SETTLED]
    about = {"command": "jrec compress", "checkpoint": str(run.saved.folder)}
    inputs = [run.folder, run.config.data.path]
    with contextlib.ExitStack() as stack:
        if (made := run.record.made) is None:
            folder = stack.enter_context(
                new_run_folder(_configuration(run, out, data, compressed), about, overwrite=overwrite, inputs=inputs)
            )
            record = TrainedRun(folder)
            record.keep_dataset(run.trained_on)
            folder, learned = record.checkpoints, {**fresh_arrays(run.config, run.schema, layout), **learned}
        else:
            folder = stack.enter_context(new_folder(out, about, kind=CHECKPOINTS, overwrite=overwrite, inputs=inputs))
            dataset = run.trained_on if data is None else dataclasses.replace(run.trained_on, path=str(data))
            meta |= dataclasses.replace(made, tables=layout.tables, dataset=dataset).meta()
            meta[FRESH] = [*run.saved.manifest.meta.get(FRESH, ()), *trains]
        Checkpoints(folder, fingerprint=identity_in(layout, run.saved)).save(
            run.saved.step, arrays=learned, sources=[CopiedRows(run.saved, uncompressed)], meta=meta
        )


def _layout(run: OpenedRun, compressed: Mapping[str, CompressedTable]) -> EmbeddingLayout:
    """The run's tables, some of them in cores now."""
    tables: list[TableConfig] = []
    for table in run.layout.tables:
        new = compressed.get(table.name)
        cut = None if new is None or new.shape is None else in_cores(table, new.shape, str(new.cores[0].dtype))
        tables += cut or [table]
    return EmbeddingLayout.build(tables, [feature for feature, _ in run.layout.features], planned=run.layout.planned)


def _configuration(
    run: OpenedRun,
    out: pathlib.Path,
    data: str | os.PathLike[str] | None,
    compressed: Mapping[str, CompressedTable],
) -> TrainConfig:
    """The run's configuration with the shapes of its compressed tables."""
    config = run.record.config([] if data is None else [f"data.path={str(data)!r}"])
    overrides = {
        name: train_override(table.shape, whole_rows=table.whole_rows)
        for name, table in compressed.items()
        if table.shape is not None
    }
    tables = dataclasses.replace(config.tables, overrides={**config.tables.overrides, **overrides})
    return dataclasses.replace(config, tables=tables, out=str(out))


def fresh_arrays(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> dict[str, jax.Array]:
    """The dense arrays of a checkpoint before the first step. Compiled, so that no rows are made for them."""

    def make() -> dict[str, jax.Array]:
        model, optimizer = build_modules(config, schema, layout, total_steps=MOST)
        return dense_arrays(compile_run(model, optimizer)[0], {}, layout)

    return jax.jit(make)()
