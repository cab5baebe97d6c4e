"""What a report compares a model's scores with: baselines of its dataset, and the scores within groups of examples."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrec.data.blocks import LABEL
from jrec.data.readers.tables import read_batches
from jrec.data.schema import DatasetError, Schema
from jrec.train.baselines.examples import Split
from jrec.train.baselines.measure import measure, wanted
from jrec.train.config import TrainConfig
from jrec.train.report.groups import describe_groups
from jrec.train.report.metrics import Scores


def comparison_sections(
    config: TrainConfig, schema: Schema, scores: Mapping[str, Scores], *, whole: bool = True
) -> dict[str, Any]:
    """The sections ``baselines`` and ``groups`` of a report, those that the configuration asks for.

    Args:
      config: The run's configuration.
      schema: The dataset that was scored, as ``Schema.load`` read it.
      scores: By split, the scores of its examples in their order.
      whole: Whether they are all of a split's; baselines are compared only then.

    Raises:
      DatasetError: If the dataset cannot be read.
    """
    folder, sections = schema.folder, {}
    if folder is None or not scores:
        return {}
    if whole and config.schedule == "plain" and wanted(config.evaluate.baselines, schema):
        sections["baselines"] = measure(folder, schema, list(scores))
    if group := config.evaluate.group:
        described = {split: _groups(folder, schema, split, group, one) for split, one in scores.items()}
        sections["groups"] = {"feature": group, "splits": described}
    return sections


def _groups(folder: pathlib.Path, schema: Schema, split: str, name: str, scores: Scores) -> dict[str, Any]:
    feature = next(feature for feature in schema.categorical if feature.name == name)
    table = schema.table(feature.table)
    blocks = Split(folder, schema, split)
    ids, labels, count = [np.empty(0, np.uint32)], [np.empty(0, bool)], 0
    for columns in blocks.read(blocks.blocks):
        if count >= scores.labels.size:
            break
        ids.append(np.asarray(columns[name]))
        labels.append(np.asarray(columns[LABEL]) > 0)
        count += len(labels[-1])
    groups, truth = np.concatenate(ids)[: scores.labels.size], np.concatenate(labels)[: scores.labels.size]
    if not np.array_equal(truth, scores.labels):
        raise DatasetError(
            f"the labels of split {split!r} in {folder} are not those that were scored; was the dataset replaced"
            " meanwhile?"
        )

    def names(rows: Sequence[int]) -> list[str]:
        values = {} if table.vocabulary is None else _values(schema.check_file(folder, table.vocabulary), rows)
        return [values.get(row, f"row {row}") for row in rows]

    return describe_groups(scores, groups.astype(np.int64), names, none=table.oov_row)


def _values(path: pathlib.Path, rows: Sequence[int]) -> dict[int, str]:
    """The values of some rows of a vocabulary."""
    import pyarrow as pa

    texts: dict[int, str] = {}
    for batch in read_batches(path, ["value", "row"], 1 << 16, remedy="copy the dataset again"):
        some = batch.filter(pa.array(np.isin(batch["row"].to_numpy(), rows)))
        pairs = zip(some["row"].to_pylist(), some["value"].to_pylist(), strict=True)
        texts |= {row: value for row, value in pairs if value is not None}
    return texts
