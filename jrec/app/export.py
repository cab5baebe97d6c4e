"""Writes a trained run for serving: a checkpoint's model by ``jrec.run.export``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from jrec.app.evaluate import RestoredRun, load_opened, open_run
from jrec.app.models.model_schema import item_table, request_schema
from jrec.app.models.rank_items import item_vectors
from jrec.checkpoint.manifest import VALUES
from jrec.data.blocks import age_columns
from jrec.nn import TwoTower
from jrec.ops.layout import TableConfig
from jrec.progress import Progress
from jrec.run.export import Exportable, write_export
from jrec.serving.format import Dtype, ExportError, Manifest, Retrieval


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
      dtype: See ``write_export``, as all that follow.
      since: An export and the deltas that follow it.
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
    towers = opened.config.model.kind == "two_tower"
    if towers and since:
        raise ExportError(
            "the vectors of all items change with the item tower, so that there is no delta (--since) of model.kind"
            " 'two_tower'; make a whole export"
        )
    run = load_opened(opened, rows=towers)
    with run.reading():
        source = Exportable(
            model=run.model,
            layout=run.layout,
            rows=lambda table, rows: run.saved.table(table).read(VALUES, rows),
            growing=run.run.growing,
            dense=tuple(feature.name for feature in run.schema.dense),
            schema=run.schema,
            run=run.config.name,
            step=run.saved.step,
        )
        if run.config.model.ranks:
            source = _ranking(run, source)
        return write_export(
            source,
            out,
            dtype=dtype,
            since=since,
            onnx=onnx,
            overwrite=overwrite,
            about={"command": "jrec export", "checkpoint": str(checkpoint)},
            inputs=[run.folder, run.config.data.path],
            progress=progress,
            report=report,
        )


def _ranking(run: RestoredRun, source: Exportable) -> Exportable:
    """What of a model that ranks items is exported: what makes a user's vector, and the rows to rank."""
    model, table = run.config.model, item_table(run.config.model, run.schema)
    schema = request_schema(model, run.schema)
    retrieval = Retrieval(
        history=model.history,
        table=table.name,
        leaves_out_history=run.config.evaluate.leave_out_history and bool(model.history),
        left_out_row=table.oov_row,
    )
    dense, requested = (tuple(feature.name for feature in of) for of in (schema.dense, schema.categorical))
    ranking = dataclasses.replace(source, schema=schema, dense=dense, requested=requested, retrieval=retrieval)
    if run.catalogue is None:
        ages = age_columns(schema)
        return dataclasses.replace(ranking, dense=(*dense, *ages), widths=ages)
    assert isinstance(run.model, TwoTower)
    name = f"{table.name}.vectors"
    if name in {other.name for other in schema.tables}:
        raise ExportError(f"table {name!r} is called as that of the vectors of {table.name!r}; give it another name")
    found = item_vectors(run.run, run.config, run.schema, run.catalogue)
    return dataclasses.replace(
        ranking,
        model=run.model.for_users(),
        rows=lambda of, rows: found[rows] if of == name else source.rows(of, rows),
        retrieval=dataclasses.replace(retrieval, table=name, left_out_row=None, items=table.name),
        vectors=TableConfig(name=name, rows=len(found), dim=found.shape[1], dtype=model.table_dtype),
        items=run.catalogue.rows,
    )
