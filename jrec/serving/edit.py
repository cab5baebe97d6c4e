"""A delta that has only rows: an edit of tables that a served model takes over, made without its run."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from jrec import environment
from jrec.outputs import Place, new_folder
from jrec.serving.checks import faults, load_chain
from jrec.serving.format import WHOLE, ExportError, Manifest, Part, folders_of, save_manifest
from jrec.serving.quantize import exported_rows

_ABOUT = {"command": "jrec.serving.write_delta"}


def write_delta(
    out: Place, rows: Mapping[str, tuple[np.ndarray, np.ndarray]], *, since: Place | Sequence[Place]
) -> Manifest:
    """Writes new values of some rows as the next delta of an export, whose dense part stays as it is.

      >>> edited = jrec.table_files.StoredTable(tensors, name, overlays=["edit.safetensors"])  # doctest: +SKIP
      >>> ids = edited.overlaid  # doctest: +SKIP
      >>> write_delta("delta", {"ngram": (ids, edited.read(ids))}, since=["exports/model"])  # doctest: +SKIP

    Only the rows that are given are read, quantized as the export has them, and written: ``Run.export(since=…)`` reads
    all rows of a run, and has a new dense part, too. Of two towers the items' vectors are a table of their own,
    ITEM.vectors, which does not follow from ITEM's rows; a warning says so.

    Args:
      out: The folder to make; it appears when it is whole.
      rows: By table, numbers of rows, (n,) integers, each once, and their values, (n, dim) floats.
      since: The export, or it and the deltas that follow it, in order.

    Returns:
      What was written: ``Model.apply`` takes it.

    Raises:
      ExportError: If ``since`` is not an export and its deltas; or there is no such table or row, one is there twice or
        in tensor-train cores, or values are of another shape or not finite.
      OutputError: If ``out`` may not or cannot be written.
    """
    folders = folders_of(since)
    if not folders:
        raise ExportError("since is empty; give the export, and the deltas that follow it")
    last, source = load_chain(folders, rows=False)[-1], folders[-1]  # rows are not read here
    if unknown := sorted(rows.keys() - last.tables.keys()):
        raise ExportError(f"{source} has no table {unknown[0]!r}; its tables are {', '.join(sorted(last.tables))}")
    retrieval = last.retrieval
    if retrieval is not None and retrieval.items in rows and retrieval.table not in rows:
        warnings.warn(
            f"rows of table {retrieval.items!r} are read for histories: items are ranked by table {retrieval.table!r},"
            " whose vectors this delta leaves as they are; give them, too, or export the run anew",
            stacklevel=2,
        )
    none = np.zeros(0, np.int64)
    with new_folder(out, _ABOUT, kind="export", inputs=folders) as folder:
        tables = {}
        for name, parts in last.tables.items():
            ids, values = rows.get(name, (none, np.zeros((0, parts[0].dim), np.float32)))
            tables[name] = _parts(folder, name, parts, np.asarray(ids), np.asarray(values))
        whole = [file for parts in last.tables.values() for part in parts if part.cores for file in part.files]
        keys = [file for file in last.files if file.startswith("keys/")]
        for file in [*whole, *keys, *(last.files.keys() & {*WHOLE})]:
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / file, folder / file)
        manifest = dataclasses.replace(last, parent=last.id, jrec=environment.version("jrec"), tables=tables)
        manifest = save_manifest(folder, manifest)
        if (fault := next(faults(folder, manifest), None)) is not None:
            raise ExportError(f"the delta cannot be served: {fault}")
        return manifest


def _parts(
    folder: pathlib.Path, name: str, parts: Sequence[Part], ids: np.ndarray, values: np.ndarray
) -> tuple[Part, ...]:
    """Writes the new rows of a table; returns its parts."""
    ids, values = _checked(name, parts, ids, values)
    out = []
    for part in parts:
        here = (ids >= part.first_row) & (ids < part.first_row + part.rows)
        if part.cores:
            if here.any():
                raise ExportError(
                    f"row {ids[here][0]} of table {name!r} is in tensor-train cores, which all rows share; train the"
                    " run, and export it since this one"
                )
            out.append(part)
            continue
        changed = f"{part.file.removesuffix('.npy')}.changed.npy"
        (folder / part.file).parent.mkdir(exist_ok=True)
        np.save(folder / changed, ids[here] - part.first_row, allow_pickle=False)
        np.save(folder / part.file, exported_rows(values[here], part.dtype), allow_pickle=False)
        out.append(dataclasses.replace(part, changed=changed))
    return tuple(out)


def _checked(name: str, parts: Sequence[Part], ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers, (n,) int64, ascending, and their values."""
    rows, dim = sum(part.rows for part in parts), parts[0].dim
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ExportError(
            f"rows of table {name!r} are named by {ids.dtype}{list(ids.shape)}; give integers of one axis"
        )
    ids = ids.astype(np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < rows:
        worst = ids[(ids < 0) | (ids >= rows)][0]
        raise ExportError(f"table {name!r} has no row {worst}; its rows are 0 to {rows - 1:,}")
    if values.shape != (ids.size, dim) or values.dtype.kind not in "fiuV":
        raise ExportError(
            f"rows of table {name!r} are {values.dtype}{list(values.shape)}; give floats of shape ({ids.size}, {dim})"
        )
    order = np.argsort(ids)
    ids, values = ids[order], values[order]
    if (twice := ids[1:] == ids[:-1]).any():
        raise ExportError(f"row {ids[1:][twice][0]} of table {name!r} is given twice")
    dtype = next((part.dtype for part in parts if not part.cores), "float32")
    with np.errstate(over="ignore"):
        # Quantized rows have a scale each, so that any finite float32 fits; a float16 overflows at 65,504.
        floats = exported_rows(values, "float32" if dtype in ("int8", "int4") else dtype)
    finite = np.isfinite(floats.astype(np.float32)).all(axis=1)
    if not finite.all():
        raise ExportError(f"row {ids[~finite][0]} of table {name!r} is not finite in {dtype}")
    return ids, values
