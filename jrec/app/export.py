"""Writes a trained run for serving: a checkpoint's model by ``jrec.run.export``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jrec.app.evaluate import RestoredRun, load_opened, open_run
from jrec.checkpoint.manifest import VALUES, TableRecord
from jrec.checkpoint.saved import Saved
from jrec.ops.layout import TableConfig
from jrec.progress import Progress
from jrec.run.export import Exportable, ExportBase, write_export
from jrec.run.run import Run
from jrec.serving.format import Dtype, ExportError, Manifest


def export_run(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    dtype: Dtype | None = None,
    since: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | ExportBase = (),
    before: Mapping[str, TableRecord] | None = None,
    run: Run | None = None,
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
      dtype: See ``write_export``, as all that follow.
      since: An export and the deltas that follow it.
      before: The tables of the checkpoint whose rows ``since`` has, where that is known: then only rows are read that
        this one, which goes on from it, has written since.
      run: The run whose state the checkpoint has, in the place of reading it again.
      onnx: Whether to write the dense part for onnxruntime, too.
      overwrite: Replaces an export at ``out``.
      progress: Shows how many rows are done; None shows nothing.
      report: Takes messages for the user.

    Returns:
      What was written.

    Raises:
      ExportError: See ``write_export``.
      CheckpointError: If the checkpoint cannot be read.
      DatasetError: If the dataset cannot be used.
      OutputError: If ``out`` may not or cannot be written.
    """
    opened = open_run(checkpoint, data)
    kind = opened.config.model.of_kind
    if kind.exports_vectors and since:
        raise ExportError(
            "the vectors of all items change with the item tower, so that there is no delta (--since) of model.kind"
            f" {kind.name!r}; make a whole export"
        )
    if run is None:
        restored = load_opened(opened, rows=kind.exports_vectors)
    else:
        restored = RestoredRun(**vars(opened), run=run, arrays={})
    with restored.advising():
        saved = restored.saved.current()
        source = Exportable(
            model=restored.model,
            layout=restored.layout,
            rows=lambda table, rows: saved.table(table).read(VALUES, rows),
            growing=restored.run.growing,
            dense=tuple(feature.name for feature in restored.schema.dense),
            schema=restored.schema,
            run=restored.config.name,
            step=restored.saved.step,
        )
        return write_export(
            kind.exportable(restored, source),
            out,
            dtype=dtype,
            since=since,
            changed=lambda table: None if before is None else _changed(table, saved, before),
            onnx=onnx,
            overwrite=overwrite,
            about={"command": "jrec export", "checkpoint": str(checkpoint)},
            inputs=[restored.folder, restored.config.data.path],
            progress=progress,
            report=report,
        )


def _changed(table: TableConfig, saved: Saved, before: Mapping[str, TableRecord]) -> np.ndarray | None:
    """The rows of a table that a checkpoint wrote after another one; None where it does not tell them."""
    if table.rows != table.table_rows or table.name not in before:
        return None
    return saved.table(table.name).rows_since(before[table.name])
