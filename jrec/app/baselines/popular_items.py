"""The baseline of models that rank items: every user is offered the items that training has most often."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrec.app.baselines.examples import Split
from jrec.app.config import TrainConfig
from jrec.app.models.catalogue import training_counts
from jrec.app.models.ranking import ranking_kind
from jrec.app.report.ranking import LEFT_OUT, NEVER, RankScores, evaluated
from jrec.data.blocks import LABEL
from jrec.data.columns import Column, ListColumn, count_examples, gather_all
from jrec.data.schema import Schema


def popular_items(config: TrainConfig, schema: Schema, splits: Sequence[str]) -> dict[str, Any]:
    """The metrics of popularity on some splits, on the terms of the model's.

    Args:
      config: The run's configuration.
      schema: The features that the model reads, read from a folder.
      splits: The splits.

    Returns:
      The report's section ``baselines``.

    Raises:
      DatasetError: If the dataset cannot be read.
    """
    begin, kind, folder = time.perf_counter(), ranking_kind(config.model), schema.folder
    table = kind.item_table(config.model, schema)
    if folder is None or (counts := training_counts(schema, table)) is None:
        return {"seconds": 0.0, "cached": False}
    candidates = np.ones(table.rows, bool)
    if table.oov_row is not None:
        candidates[table.oov_row] = False
    metrics = {}
    for split in splits:
        blocks = Split(folder, schema, split)
        read = blocks.read(blocks.blocks)
        if schema.labels:
            read = (gather_all(columns, np.flatnonzero(np.asarray(columns[LABEL]) > 0)) for columns in read)
        ranks = [_ranks(config, counts, candidates, columns) for columns in read]
        scores = RankScores(ranks=np.concatenate(ranks), candidates=int(candidates.sum()), at=config.evaluate.at)
        metrics[split] = evaluated(scores).to_dict()
    chosen_by = f"training counts of table {table.name!r}"
    popularity = {"splits": metrics, "feature": kind.item(config.model), "ranked_by": chosen_by}
    return {"popularity": popularity, "seconds": time.perf_counter() - begin, "cached": False}


def _ranks(
    config: TrainConfig, counts: np.ndarray, candidates: np.ndarray, columns: Mapping[str, Column]
) -> np.ndarray:
    """(examples,) int32: how many other candidates are counted at least as often as an example's item."""
    kind = ranking_kind(config.model)
    items = np.asarray(columns[kind.item(config.model)]).astype(np.int64)
    known = candidates[items]
    ascending = np.sort(counts[candidates])
    above = len(ascending) - np.searchsorted(ascending, counts[items]) - 1
    if config.evaluate.leave_out_history and (history := kind.history(config.model)):
        histories = columns[history]
        assert isinstance(histories, ListColumn)  # as ``ModelKind.schema`` has it
        example = np.repeat(np.arange(count_examples(histories)), np.diff(histories.offsets))
        pairs = np.unique(np.stack([example, histories.values.astype(np.int64)], axis=1), axis=0)
        example, past = pairs.T
        left_out = candidates[past] & (past != items[example]) & (counts[past] >= counts[items[example]])
        above = above - np.bincount(example[left_out], minlength=len(items))
        above[example[past == items[example]]] = LEFT_OUT
    return np.where(known, above, NEVER).astype(np.int32)
