"""Writes a model for serving, wherever its rows are: the dense part as a program, rows as plain arrays; and deltas."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast, get_args

import jax
import numpy as np
from jax.typing import ArrayLike

from jrec import environment
from jrec.data.growing import GrowingVocabulary
from jrec.data.schema import Schema
from jrec.files import stays_inside
from jrec.json_values import JsonMapping, JsonObject
from jrec.nn.optimizer import SparseModel
from jrec.nn.tt_stack import TTStack
from jrec.ops.layout import EmbeddingLayout, TableConfig
from jrec.outputs import new_folder
from jrec.progress import Progress
from jrec.regression import Numbers
from jrec.run.state import RunState
from jrec.serving.checks import (
    MAX_ROWS,
    difference,
    faults,
    load_chain,
    save_keying,
    schema_faults,
)
from jrec.serving.format import (
    APPEND,
    ITEMS,
    MODEL,
    ONNX,
    PARAMETERS,
    Dtype,
    ExportError,
    Feature,
    Manifest,
    Part,
    Retrieval,
    folders_of,
    keys_file,
    save_manifest,
)
from jrec.serving.onnx import onnx_program
from jrec.serving.program import Parameters, export_append, export_program, extends
from jrec.serving.quantize import exported_rows
from jrec.serving.tables import ServedTables
from jrec.table_files.safetensors import encoded_tensors

Place = str | os.PathLike[str]
_AT_ONCE = 1 << 16  # rows that are read, cast and written at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exportable:
    """A model, its rows, and what an export says about it.

    Attributes:
      model: The model with its dense parameters and tensor-train cores; rows are not read from it.
      layout: The tables and features.
      rows: Reads rows: of a table's name and (n,) int64 row numbers, (n, dim) floats.
      growing: The vocabularies of the tables that grow.
      dense: Names of the dense features, in the order the model takes them.
      widths: How many numbers an example has, of dense features that have several.
      schema: How raw values become rows, read from its folder; None where requests have row numbers.
      run: The run's name.
      step: Steps taken.
      retrieval: How the model ranks items, if it does.
      requested: The features of a request to a model that ranks items.
      vectors: The table of the ranked items' vectors, which is in no layout; None for none. Only it and the tables of
        ``requested`` are then exported, and no delta.
      numbers: How outputs are numbers, by task whose label is one; under "" of a model of one label that is.
      items: (items,) int64, which row of ``retrieval.items`` each of ``vectors`` is of; None without vectors.
    """

    model: SparseModel
    layout: EmbeddingLayout
    rows: Callable[[str, np.ndarray], np.ndarray]
    growing: Mapping[str, GrowingVocabulary]
    dense: tuple[str, ...]
    schema: Schema | None
    run: str
    step: int
    retrieval: Retrieval | None = None
    requested: tuple[str, ...] = ()
    vectors: TableConfig | None = None
    items: np.ndarray | None = None
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)

    @property
    def num_dense(self) -> int:
        """How many dense numbers an example has."""
        return sum(self.widths.get(name, 1) for name in self.dense)

    @property
    def tables(self) -> list[tuple[str, TableConfig]]:
        """Stacks' names and tables, or parts of tables, a table's parts in the order of its rows."""
        parts = [(stack.name, table) for stack in self.layout.members for table in stack.tables]
        if self.vectors is not None:
            read = {feature.table for feature, _ in self.layout.features if feature.name in self.requested}
            parts = [("", self.vectors), *(part for part in parts if part[1].name in read)]
        return sorted(parts, key=lambda part: (part[1].name, part[1].first_row))

    @property
    def meaning(self) -> str:
        """What rows mean (``Manifest.rows``): a delta must have the same."""
        if self.schema is not None:
            return self.schema.identity.rows
        rows = {table.name: table.table_rows for _, table in self.tables}
        about: JsonObject = {"ids": rows, "key_seeds": {name: seed for name, (seed, _) in self.keying.items()}}
        if canonical := sorted(name for name, (_, one_form) in self.keying.items() if one_form):
            about["canonical"] = canonical
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    @property
    def keying(self) -> dict[str, tuple[int, bool]]:
        """By table that grows, the seed of the hash of long texts, and whether texts are brought into one form."""
        return {name: (vocabulary.key_seed, vocabulary.canonical) for name, vocabulary in self.growing.items()}


def of_run(
    state: RunState, *, step: int, dense: Sequence[str] | Mapping[str, int], schema: Schema | None
) -> Exportable:
    """A run as its last step left it; rows in host memory are flushed.

    Raises:
      ExportError: If the run has several processes, each of which would write the export.
    """
    if (processes := jax.process_count()) > 1:
        raise ExportError(
            f"the run has {processes} processes, but one writes an export; save a checkpoint (Run.save), restore it in"
            " one process on any devices, and export that"
        )
    model = state.modules()[0]
    if schema is not None and not dense:
        dense = [feature.name for feature in schema.dense]
    return Exportable(
        model=model,
        layout=state.layout,
        rows=state.read,
        growing=state.growing.now(),
        dense=tuple(dense),
        widths={name: width for name, width in dense.items() if width != 1} if isinstance(dense, Mapping) else {},
        schema=schema,
        run=type(model).__name__,
        step=step,
    )


def write_export(
    source: Exportable,
    out: Place,
    *,
    dtype: Dtype | None = None,
    since: Place | Sequence[Place] | ExportBase = (),
    changed: Callable[[TableConfig], np.ndarray | None] = lambda table: None,
    onnx: bool = False,
    overwrite: bool = False,
    about: JsonMapping,
    inputs: Iterable[Place] = (),
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Manifest:
    """Writes a model for ``jrec.serving``; its rows are read in pieces.

    Args:
      source: The model.
      out: The folder to make; it appears when it is whole.
      dtype: The dtype of exported rows; "int8" and "int4" quantize each row. None for the tables' own, which must then
        be one. Tensor-train cores keep their dtype.
      since: An export, or a list of it and the deltas that follow it, in order: only rows that changed since then are
        written, as the next delta.
      changed: Of a table or a part, the (n,) int64 ascending numbers of all rows that may have changed since; None
        where that is not known, so that all rows are compared.
      onnx: Whether to write the dense part for onnxruntime, too.
      overwrite: Replaces an export at ``out``.
      about: What is being made; see ``jrec.outputs.new_folder``.
      inputs: What it is made of, beside ``since``; see ``jrec.outputs.check_output``.
      progress: Shows how many rows are done; None shows nothing.
      report: Takes messages for the user.

    Returns:
      What was written.

    Raises:
      ExportError: If ``since`` is not an export and its deltas, or is of other tables, rows or another dtype; if the
        model, its names or its schema cannot be served.
      OutputError: If ``out`` may not or cannot be written.
    """
    base = since if isinstance(since, ExportBase) else ExportBase.read(since) if since else None
    stored = _dtype_of(source, dtype, base)
    # With a schema a request has its columns, and onnxruntime all vectors; else what predictions read.
    every = source.schema is not None or onnx
    served = source.layout.order if every else None if base is None else base.features
    if source.retrieval is not None:
        served = list(source.requested)
        if onnx:
            raise ExportError(
                "the model ranks items by a user's vector, which model.onnx does not have; leave out --onnx"
            )
    model = Parameters(source.model)
    # Before a folder is made: a model that cannot be exported leaves nothing behind.
    program = export_program(model, source.layout, source.num_dense, served=served)
    manifest = Manifest(
        id="",
        parent="" if base is None else base.manifests[-1].id,
        jrec=environment.version("jrec"),
        run=source.run,
        step=source.step,
        rows=source.meaning,
        dtype=stored,
        dense=source.dense,
        widths=source.widths,
        features=tuple(feature for feature in _features(source.layout) if feature.name in program.features),
        tables={},
        files={},
        retrieval=source.retrieval,
        numbers=source.numbers.get(""),
        task_numbers={task: own for task, own in source.numbers.items() if task},
    )
    _check_names(source)
    if base is not None:
        base.check(manifest)
    inputs = [*inputs, *(() if base is None else base.folders)]
    with new_folder(out, about, kind="export", overwrite=overwrite, inputs=inputs, report=report) as folder:
        (folder / "tables").mkdir()
        (folder / MODEL).write_bytes(program.content)
        parameters = program.parameters
        if len(manifest.features) == 1 and extends(source.model):  # and nothing but the history goes in
            append = export_append(model, source.layout, manifest.features[0].name, source.num_dense)
            (folder / APPEND).write_bytes(append.content)
            parameters |= append.parameters
        (folder / PARAMETERS).write_bytes(encoded_tensors(model.arrays(parameters)))
        if source.items is not None:
            np.save(folder / ITEMS, source.items, allow_pickle=False)
        if onnx:
            (folder / ONNX).write_bytes(onnx_program(model, source.layout, source.num_dense))
        writer = _Writer(source, folder, stored, base, changed)
        total = sum(table.rows for _, table in source.tables if table.tier != "tt")
        with (progress or Progress(False)).stage("export", max(total, 1)) as advance:
            tables = writer.write(advance)
        manifest = dataclasses.replace(manifest, tables=tables)
        if base is not None:
            base.check(manifest)
        elif source.schema is not None:
            _copy_vocabularies(source.schema, folder)
        else:
            save_keying(folder, source.keying)
        for name, vocabulary in source.growing.items():
            (folder / "keys").mkdir(exist_ok=True)
            np.save(folder / keys_file(name), vocabulary.keys, allow_pickle=False)
        manifest = save_manifest(folder, manifest)
        if (fault := next(_faults(source, folder, manifest), None)) is not None:
            raise ExportError(f"the model cannot be served: {fault}")
        return manifest


def _dtype_of(source: Exportable, dtype: Dtype | None, base: ExportBase | None) -> Dtype:
    """The dtype of exported rows."""
    if dtype is not None and dtype not in get_args(Dtype):
        raise ExportError(f"dtype is {dtype!r}; choose one of {', '.join(get_args(Dtype))}")
    if dtype is not None:
        return dtype
    dtypes = sorted({table.dtype for _, table in source.tables if table.tier != "tt"}) or ["float32"]
    if base is None and len(dtypes) > 1:
        raise ExportError(f"the model's tables are of {' and '.join(dtypes)}; say which the export is of (dtype)")
    return cast("Dtype", dtypes[0] if base is None else base.dtype)


def _check_names(source: Exportable) -> None:
    """Refuses names of tables that are no names of files."""
    for _, table in source.tables:
        if "/" in table.name or "\0" in table.name or not stays_inside(f"tables/{table.name}.npy"):
            raise ExportError(f"table {table.name!r} cannot have a file of its name; call it by letters and digits")


def _faults(source: Exportable, folder: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    """Why ``jrec.serving`` would refuse what was written."""
    yield from faults(folder, manifest)
    if source.schema is None:
        return
    yield from (f"its schema: {fault}" for fault in schema_faults(folder, source.schema, manifest))
    if (grow := source.schema.growing & manifest.tables.keys()) != source.growing.keys():
        yield f"by its schema the tables that grow are {sorted(grow)}, but in the run they are {sorted(source.growing)}"


def _features(layout: EmbeddingLayout) -> tuple[Feature, ...]:
    return tuple(
        Feature(name=f.name, table=f.table, pooling=f.pooling, max_length=f.max_length, dim=dim, weighted=f.weighted)
        for f, dim in layout.features
    )


def _copy_vocabularies(schema: Schema, folder: pathlib.Path) -> None:
    """Copies what turns raw values into rows: the schema, vocabularies, hash buckets, bijections, sums of labels."""
    if schema.folder is None:
        raise ExportError("the schema was not read from a folder, which has its vocabularies; give Schema.load(folder)")
    files = {table.vocabulary for table in schema.tables} | {f"buckets/{table.name}.npy" for table in schema.tables}
    files |= {table.bijection.file for table in schema.tables if table.bijection is not None}
    files |= {*schema.statistic_files}
    for file in sorted(file for file in files if file is not None and (schema.folder / file).is_file()):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(schema.folder / file, folder / file)
    schema.save(folder)


class _Writer:
    """Writes the tables of a model to a folder."""

    def __init__(
        self,
        source: Exportable,
        folder: pathlib.Path,
        dtype: Dtype,
        base: ExportBase | None,
        changed: Callable[[TableConfig], np.ndarray | None],
    ):
        self._source, self._folder, self._dtype, self._base, self._changed = source, folder, dtype, base, changed

    def write(self, advance: Callable[[int], None]) -> dict[str, tuple[Part, ...]]:
        """Writes all tables; returns their parts."""
        tables: dict[str, tuple[Part, ...]] = {}
        done = 0
        for stack, table in self._source.tables:
            if table.table_rows > MAX_ROWS:
                raise ExportError(
                    f"table {table.name!r} has {table.table_rows:,} rows; serving reads up to {MAX_ROWS:,}"
                )
            if table.tier == "tt":
                part = self._cores(table, self._source.model.embeddings.tt[stack])
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

    def _saved(self, path: str, array: ArrayLike) -> str:
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
        # Numbers of rows take 8 bytes each beside the rows: where most changed, all are compared, or written whole.
        if self._base is not None and (rows := self._changed(table)) is not None and 2 * rows.size < table.rows:
            some = [rows[begin : begin + _AT_ONCE] for begin in range(0, max(rows.size, 1), _AT_ONCE)]
            self._saved(part.changed, rows)
            self._saved(part.file, np.concatenate([self._exported(table, numbers) for numbers in some]))
            advance(table.rows)
            return part
        pieces = self._pieces(table, advance)
        if self._base is None:
            first = next(pieces)
            out = self._array(part, first.dtype, (table.rows, *first.shape[1:]))
            begin = 0
            for piece in itertools.chain([first], pieces):
                out[begin : begin + len(piece)] = piece
                begin += len(piece)
            out.flush()
            return part
        held, begin = self._base.tables.stored(table.name, part), 0
        numbers, values = [np.zeros(0, np.int64)], [held[:0]]
        for piece in pieces:
            before = held[begin : begin + len(piece)]
            # By bytes: NaN differs from itself, and -0 equals 0.
            same = (_bytes(piece) == _bytes(before)).all(axis=1)
            numbers.append(np.flatnonzero(~same) + begin)
            values.append(piece[~same])
            begin += len(piece)
        changed = np.concatenate(numbers)
        # Else the whole table is less than the changed rows with their numbers.
        if changed.size * (changed.itemsize + held.itemsize * held[:1].size) < held.nbytes:
            self._saved(part.changed, changed)
            self._saved(part.file, np.concatenate(values))
            return part
        out = self._array(part, held.dtype, held.shape)
        for begin in range(0, len(held), _AT_ONCE):
            out[begin : begin + _AT_ONCE] = held[begin : begin + _AT_ONCE]
        out[changed] = np.concatenate(values)
        out.flush()
        return dataclasses.replace(part, changed="")

    def _array(self, part: Part, dtype: np.dtype, shape: tuple[int, ...]) -> np.memmap:
        return np.lib.format.open_memmap(self._folder / part.file, mode="w+", dtype=dtype, shape=shape)

    def _pieces(self, table: TableConfig, advance: Callable[[int], None]) -> Iterator[np.ndarray]:
        """A table's rows as they are exported, in order."""
        for begin in range(0, table.rows, _AT_ONCE):
            stop = min(begin + _AT_ONCE, table.rows)
            yield self._exported(table, np.arange(begin, stop))
            advance(stop)

    def _exported(self, table: TableConfig, numbers: np.ndarray) -> np.ndarray:
        """Some rows of a table, or of a part, as they are exported."""
        return exported_rows(self._source.rows(table.name, numbers + table.first_row), self._dtype)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportBase:
    """What a delta follows: an export and deltas in order, which were read for their checksums.

    Attributes:
      folders: The export's, and the deltas'.
      manifests: Theirs.
    """

    folders: tuple[pathlib.Path, ...]
    manifests: tuple[Manifest, ...]

    @staticmethod
    def read(places: Place | Sequence[Place]) -> ExportBase:
        """Reads and checks an export and its deltas, if any.

        Raises:
          ExportError: If one is damaged, or they do not follow each other.
        """
        folders = tuple(folders_of(places))
        return ExportBase(folders=folders, manifests=load_chain(folders))

    def followed_by(self, folder: pathlib.Path, manifest: Manifest) -> ExportBase:
        """The same with a delta that was written for it just now, which is not read again."""
        return ExportBase(folders=(*self.folders, folder), manifests=(*self.manifests, manifest))

    @functools.cached_property
    def tables(self) -> ServedTables:
        """The rows as of the last delta."""
        tables = ServedTables.load(self.folders[0], self.manifests[0])
        for folder, manifest in zip(self.folders[1:], self.manifests[1:], strict=True):
            change = tables.change(folder, manifest)
            change.write()
            tables = change.tables
        return tables

    @property
    def dtype(self) -> str:
        """The dtype of exported rows."""
        return self.manifests[0].dtype

    @property
    def features(self) -> list[str]:
        """The names of the features of a request."""
        return [feature.name for feature in self.manifests[0].features]

    def check(self, manifest: Manifest) -> None:
        """Refuses a model that is not the export's model; tables that are not known yet are its own."""
        first = self.manifests[0]
        whole = manifest if manifest.tables else dataclasses.replace(manifest, tables=first.tables)
        if (reason := difference(first, whole)) is not None:
            raise ExportError(f"a delta of {self.folders[0]} needs its model: {reason}; make a whole export")
