"""Reordering the rows of a dataset's tables: ``jrec reorder`` (EL-Rec, §IV).

Rows that training reads together come to lie together, so that the lookups of a batch share more of a tensor-train
table's products. The shards stay as they are: each table gets a bijection, which the loader applies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jrec.data.bijection import FOLDER, save_order, table_checksums
from jrec.data.loader import LoaderConfig
from jrec.data.schema import SCHEMA_FILE, Bijection, DatasetError, Schema
from jrec.json_values import JsonObject
from jrec.ops.layout import MAX_ROWS
from jrec.outputs import link, locked, new_folder, write_file, writing
from jrec.prepare.reorder.effect import Effect, measure_effects, random_order, total_prefixes
from jrec.prepare.reorder.log import Reading, stored
from jrec.prepare.reorder.options import ReorderOptions
from jrec.prepare.reorder.table import TableOrder, index_graph, table_order
from jrec.prepare.reorder.verify import verify
from jrec.progress import Progress

REPORT_FILE = "report.json"
_VERIFIED_BATCHES = 32  # of every split, before the new schema is in force; `jrec reorder --verify` compares all
_QUIET = Progress(show=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a reordering did.

    Attributes:
      schema: The dataset's schema as it is now.
      orders: The orders of the tables that were considered.
      gains: By table, the share of unique prefixes that its new order saves on batches as training reads them.
      kept: Tables whose new order is in force.
      effects: The effects that the report states.
    """

    schema: Schema
    orders: tuple[TableOrder, ...]
    gains: Mapping[str, float]
    kept: tuple[str, ...]
    effects: tuple[Effect, ...]


def reorder(
    folder: str | os.PathLike[str],
    options: ReorderOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    command: str = "",
    progress: Progress = _QUIET,
    report: Callable[[str], None] = lambda message: None,
) -> Outcome:
    """Reorders the large tables of a dataset, in place or in a copy that shares its shards.

    An earlier reordering is replaced, never built upon. The new one is verified, then the schema is replaced in one
    step; whatever stops this function before leaves the dataset as it was.

    Args:
      folder: The dataset.
      options: how.
      out: A new dataset folder; None changes ``folder``.
      overwrite: Whether a dataset at ``out`` may be replaced.
      command: What the user typed, for the provenance.
      progress: Shows how far it is.
      report: Takes messages for the user.

    Returns:
      What was done; ``reorder/report.json`` in the dataset says it too.

    Raises:
      DatasetError: If the dataset cannot be used, or no table is large enough.
      MissingIgraphError: If igraph is not installed.
    """
    options = options or ReorderOptions()
    folder = pathlib.Path(folder)
    with _target(folder, out, overwrite=overwrite, command=command, report=report) as target:
        schema = Schema.load(folder)
        schema.check_numbered("`jrec reorder` renumbers rows before training")
        graphs = (
            index_graph(folder, stored(schema), table, options, progress) for table in choose_tables(schema, options)
        )
        orders = [table_order(graph, options, progress) for graph in graphs]
        outcome = _judge(folder, stored(schema), options, orders, progress)
        with writing(target):
            entries = {o.table: save_order(target, o.table, o.order) for o in orders if o.table in outcome.kept}
            schema = _with_bijections(schema, entries, options, command)
            (target / FOLDER).mkdir(exist_ok=True)
            _write_report(target / FOLDER, schema, options, outcome)
            # Before the schema is replaced, which is when the new numbers count; the orders' files are new ones until
            # then.
            verify(target, schema, limit=_VERIFIED_BATCHES, progress=progress)
            schema.save(target)
            # Only now: until the schema is replaced, the old one names the old files.
            _sweep(target, schema)
    return dataclasses.replace(outcome, schema=schema)


def restore(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Takes a dataset's bijections away: rows have their stored numbers again. Returns the tables that had one."""
    folder = pathlib.Path(folder)
    Schema.load(folder)
    with locked(folder.absolute()), writing(folder):
        schema = Schema.load(folder)
        provenance = {k: v for k, v in schema.provenance.items() if k != "reorder"}
        dataclasses.replace(stored(schema), provenance=provenance).save(folder)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return tuple(t.name for t in schema.tables if t.bijection is not None)


def choose_tables(schema: Schema, options: ReorderOptions) -> list[str]:
    """The tables to reorder: those asked for, or all that are large enough and read by some feature.

    Tables of 2^31 - 1 rows or more, which no tensor train can have, are left out.

    Raises:
      DatasetError: On a table that the dataset lacks or that has too many rows, or if there is none.
    """
    names = [t.name for t in schema.tables]
    if options.tables is not None:
        if unknown := [name for name in options.tables if name not in names]:
            raise DatasetError(f"the dataset has no table {', '.join(unknown)}; its tables are {', '.join(names)}")
        for name in options.tables:
            if (rows := schema.table(name).rows) >= MAX_ROWS:
                raise DatasetError(
                    f"table {name!r} has {rows:,} rows; tables of up to {MAX_ROWS - 1:,}, which tensor trains can have,"
                    " are reordered: leave it out of --tables"
                )
        return list(dict.fromkeys(options.tables))
    read = {f.table for f in schema.categorical}
    large = [t for t in schema.tables if options.min_rows <= t.rows < MAX_ROWS and t.name in read]
    if not large:
        most = max((t.rows for t in schema.tables if t.rows < MAX_ROWS), default=0)
        raise DatasetError(
            f"no table has {options.min_rows:,} rows or more, the largest has {most:,}; small tables gain nothing from"
            " another order. Name some (--tables) or lower the threshold (--min-rows)"
        )
    return [t.name for t in sorted(large, key=lambda t: -t.rows)]


@contextlib.contextmanager
def _target(
    folder: pathlib.Path, out: str | os.PathLike[str] | None, *, overwrite: bool, command: str, report: Callable
) -> Iterator[pathlib.Path]:
    """The folder to write to: the dataset itself, locked, or a copy that appears when all is done."""
    Schema.load(folder)
    if out is None:
        with locked(folder.absolute()):
            yield folder
        return
    about = {"command": command, "dataset": str(folder)}
    with new_folder(out, about, kind="dataset", overwrite=overwrite, inputs=[folder], report=report) as target:
        for path in sorted(folder.iterdir()):
            if path.name in (FOLDER, SCHEMA_FILE):
                continue
            if path.is_dir():
                shutil.copytree(path, target / path.name, copy_function=link)
            else:
                link(path, target / path.name)
        yield target


def _judge(
    folder: pathlib.Path, schema: Schema, options: ReorderOptions, candidates: Sequence[TableOrder], progress: Progress
) -> Outcome:
    """Measures the orders and keeps those that are worth it."""
    orders = {
        o.table: {
            "random": random_order(len(o.order), options.seed),
            "stored": np.arange(len(o.order), dtype=np.uint32),
            "frequency": o.frequency_order,
            "reordered": o.order,
        }
        for o in candidates
    }

    def read(split: str, readings: list[Reading]) -> list[Effect]:
        return measure_effects(folder, schema, split, orders, readings, progress=progress)

    decisive = read("train", [_reading(options, options.batch_size, options.window_blocks)])
    gains = {e.table: 1 - e.prefixes["reordered"] / max(e.prefixes["stored"], 1) for e in decisive}
    least = options.min_gain
    kept = tuple(table for table, gain in gains.items() if least is None or gain >= least)
    ways = dict.fromkeys((0, options.window_blocks, LoaderConfig.window_blocks))
    effects = []
    for window_blocks in ways:
        effects += read("train", [_reading(options, size, window_blocks) for size in options.report_batch_sizes])
    if schema.with_examples(["valid"]):
        effects += read("valid", [_reading(options, size, 0) for size in options.report_batch_sizes])
    return Outcome(schema=schema, orders=tuple(candidates), gains=gains, kept=kept, effects=tuple(effects))


def _reading(options: ReorderOptions, batch_size: int, window_blocks: int) -> Reading:
    return Reading(
        batch_size=batch_size,
        window_blocks=window_blocks,
        seed=options.seed,
        limit=options.report_batches,
        full=True,
        workers=options.threads,
    )


def _with_bijections(schema: Schema, entries: Mapping[str, Bijection], options: ReorderOptions, command: str) -> Schema:
    tables = tuple(dataclasses.replace(t, bijection=entries.get(t.name)) for t in schema.tables)
    provenance = {**schema.provenance, "reorder": {"command": command, "options": _plain(options)}}
    return dataclasses.replace(schema, tables=tables, provenance=provenance)


def _plain(options: ReorderOptions) -> JsonObject:
    content = {k: v for k, v in dataclasses.asdict(options).items() if k != "threads"}
    return {**content, "degree": "all" if np.isinf(options.degree) else options.degree}


def _write_report(folder: pathlib.Path, schema: Schema, options: ReorderOptions, outcome: Outcome) -> None:
    """The figures as JSON; the checksums say which bijections they are of."""
    content = {
        "format": "jrec-reorder-report",
        "version": 1,
        "dataset": schema.name,
        "bijections": table_checksums(schema) or {},
        "options": _plain(options),
        "tables": {
            o.table: {**o.figures(), "gain": outcome.gains[o.table], "kept": o.table in outcome.kept}
            for o in outcome.orders
        },
        "effects": [dataclasses.asdict(e) for e in outcome.effects],
    }
    write_file(folder / REPORT_FILE, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _sweep(folder: pathlib.Path, schema: Schema) -> None:
    """Removes bijections that the schema does not name: those that were replaced, or that a kill left behind."""
    named = {t.bijection.file for t in schema.tables if t.bijection is not None}
    for path in (folder / FOLDER).iterdir():
        if path.name != REPORT_FILE and f"{FOLDER}/{path.name}" not in named:
            path.unlink()


def summary(outcome: Outcome) -> list[str]:
    """A line for each table, and one for their sum in order of time."""
    lines = []
    for o in outcome.orders:
        verdict = "reordered" if o.table in outcome.kept else "left as it is"
        lines.append(
            f"{o.table}: {verdict}; prefixes of a batch {-100 * outcome.gains[o.table]:+.1f} %, {o.communities:,}"
            f" communities of {o.accessed - o.hot:,} rows, modularity {o.modularity:.3f}"
        )
    for size in dict.fromkeys(e.batch_size for e in outcome.effects):
        effects = [e for e in outcome.effects if (e.split, e.window_blocks, e.batch_size) == ("train", 0, size)]
        if effects:
            counts = ", ".join(f"{name} {total_prefixes(effects, name):,.0f}" for name in effects[0].prefixes)
            lines.append(f"batch {size:,} in order of time, unique prefixes of all these tables: {counts}")
    return lines
