"""What a report compares a model's scores with: baselines of its dataset, and the scores of some of the examples."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jrec.app.baselines.examples import Split
from jrec.app.baselines.measure import measure, wanted
from jrec.app.config import TrainConfig
from jrec.app.report.groups import describe_groups
from jrec.app.report.ranking import AnyScores
from jrec.app.report.slices import EACH, Slicer, add_block, slicers
from jrec.data.blocks import LABEL, Column
from jrec.data.parquet import read_batches
from jrec.data.schema import DatasetError, Schema
from jrec.json_values import JsonObject
from jrec.metrics import LabelScores

if TYPE_CHECKING:
    from jrec.app.config.typed_toml import Section


def comparison_sections(
    config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool = True, slices: bool = True
) -> JsonObject:
    """The sections ``baselines``, ``groups`` and ``slices`` of a report, those that the configuration asks for.

    Args:
      config: The run's configuration.
      schema: The dataset that was scored, as ``Schema.load`` read it.
      scores: By split, the scores of its examples in their order.
      whole: Whether they are all of a split's; baselines are compared only then.
      slices: Whether the last split is sliced, too.

    Raises:
      DatasetError: If the dataset cannot be read.
    """
    if schema.folder is None or not scores:
        return {}
    return config.model.of_kind.comparisons(config, schema, scores, whole=whole, slices=slices)


def of_labels(
    config: TrainConfig, schema: Schema, scores: Mapping[str, LabelScores], *, whole: bool, slices: bool
) -> JsonObject:
    """``comparison_sections`` of models that score lines, on a dataset that is read from a folder."""
    folder, sections = schema.folder, {}
    assert folder is not None
    if whole and config.schedule == "plain" and wanted(config.evaluate.baselines, schema):
        sections["baselines"] = measure(folder, schema, list(scores))
    group, last, described = config.evaluate.group, list(scores)[-1], {}
    for split, one in scores.items():
        sliced = slices and config.schedule == "plain" and split == last
        if not (group or sliced):
            continue
        some, groups = slicers(schema) if sliced else [], []
        for columns, own in _scored(folder, schema, split, one):
            add_block(some, columns, own)
            if group:
                groups.append(np.asarray(columns[group])[: own.labels.size])
        if group:
            described[split] = _groups(folder, schema, group, one, np.concatenate(groups).astype(np.int64))
        if sliced:
            sections["slices"] = {"split": split, "slices": _slices(folder, schema, some)}
    if group:
        sections["groups"] = {"feature": group, "splits": described}
    return sections


def _scored(
    folder: pathlib.Path, schema: Schema, split: str, scores: LabelScores
) -> Iterator[tuple[Mapping[str, Column], LabelScores]]:
    """The blocks that were scored, each with the scores of its examples, of which the last block may have more."""
    blocks, begin = Split(folder, schema, split), 0
    for columns in blocks.read(blocks.blocks):
        if begin >= scores.labels.size:
            return
        span = slice(begin, begin + len(columns[LABEL]))
        own = scores.cut(span)
        labels = np.asarray(columns[LABEL])[: own.labels.size]
        if not np.array_equal(labels if schema.numbers is not None else labels > 0, own.labels):
            raise DatasetError(
                f"the labels of split {split!r} in {folder} are not those that were scored; was the dataset replaced"
                " meanwhile?"
            )
        yield columns, own
        begin = span.stop
    if begin < scores.labels.size:
        raise DatasetError(
            f"split {split!r} in {folder} has {begin:,} examples, but {scores.labels.size:,} were scored; was the"
            " dataset replaced meanwhile?"
        )


def _slices(folder: pathlib.Path, schema: Schema, some: Sequence[Slicer]) -> list[Section]:
    described = []
    for one in some:
        table = one.table
        names: dict[int, str] = {}
        if table.vocabulary is not None and table.rows <= EACH:
            names = _values(schema.check_file(folder, table.vocabulary), range(table.rows))
        described += one.describe(names)
    return described


def _groups(folder: pathlib.Path, schema: Schema, name: str, scores: LabelScores, groups: np.ndarray) -> JsonObject:
    table = schema.table(next(f.table for f in schema.categorical if f.name == name))

    def names(rows: Sequence[int]) -> list[str]:
        values = {} if table.vocabulary is None else _values(schema.check_file(folder, table.vocabulary), rows)
        return [values.get(row, f"row {row}") for row in rows]

    return describe_groups(scores, groups, names, none=table.oov_row)


def _values(path: pathlib.Path, rows: Sequence[int]) -> dict[int, str]:
    """The values of some rows of a vocabulary."""
    import pyarrow as pa

    texts: dict[int, str] = {}
    for batch in read_batches(path, ["value", "row"], 1 << 16, remedy="copy the dataset again"):
        some = batch.filter(pa.array(np.isin(batch["row"].to_numpy(), rows)))
        pairs = zip(some["row"].to_pylist(), some["value"].to_pylist(), strict=True)
        texts |= {row: value for row, value in pairs if value is not None}
    return texts
