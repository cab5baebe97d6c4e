"""The baselines of models that rank items: popularity and, of histories, transitions and EASE."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jrec.app.baselines.ease import MOST_ITEMS, RIDGES, Ease, SharedUsers
from jrec.app.baselines.examples import Split
from jrec.app.baselines.item_order import ItemOrder, Pairs
from jrec.app.config import TrainConfig
from jrec.app.models.ranking import feature_named, ranking_kind
from jrec.app.report.ranking import LEFT_OUT, NEVER, RankScores, evaluated
from jrec.data.blocks import LABEL
from jrec.data.columns import Column, ListColumn, count_examples, gather_all
from jrec.data.schema import Schema, Table
from jrec.json_values import JsonObject
from jrec.prepare.prepare_options import LEAVE_ONE_OUT

_PAIRS = 20_000_000
"""Pairs that are counted at most, the last ones of training, so that memory stays bounded on long logs."""
_COUNTED = 1e12
"""Multiplications that counting which items share users takes at most: half a minute of two cores."""
_RANKED = 5e11
"""Additions that ranking examples by EASE takes at most, about a minute; for more there is no EASE."""
_MERGED = 1_000_000
"""Pairs that wait at least until they are merged with those before them."""


def popular_items(config: TrainConfig, schema: Schema, splits: Sequence[str]) -> JsonObject:
    """The metrics of popularity and, where there is a history, of transitions and EASE, on the terms of the model's.

    Args:
      config: The run's configuration.
      schema: The features that the model reads, read from a folder.
      splits: The splits.

    Returns:
      The report's section ``baselines``.

    Raises:
      DatasetError: If the dataset cannot be read.
    """
    begin, kind = time.perf_counter(), ranking_kind(config.model)
    table = kind.item_table(config.model, schema)
    if schema.folder is None:
        return {"seconds": 0.0, "cached": False}
    counts, lines = _counts(config, schema, table)
    # Of two towers only items that are those of training lines have a vector, and so a place among the ranked.
    candidates = lines > 0 if kind.exports_vectors else np.ones(table.rows, bool)
    if table.oov_row is not None:
        candidates[table.oov_row] = False
    item, history = kind.item(config.model), kind.history(config.model)

    def section(order: ItemOrder | Ease, ranked_by: str) -> JsonObject:
        metrics = {split: evaluated(_scores(config, schema, order, split)).to_dict() for split in splits}
        return {"splits": metrics, "feature": item, "ranked_by": ranked_by}

    popular = section(ItemOrder(counts, candidates=candidates), f"how often training has them as {item!r}")
    sections: JsonObject = {"popularity": popular}
    if history:
        order = ItemOrder(counts, transitions(config, schema, table), candidates=candidates)
        ranked_by = f"how often they came right after the last item of {history!r} in training"
        sections["transitions"] = section(order, ranked_by)
        examples = sum(metrics["examples"] for metrics in popular["splits"].values())
        if table.rows <= MOST_ITEMS and examples <= _rankable(config, schema, table.rows):
            ease, ridge = _ease(config, schema, candidates)
            sections["ease"] = section(ease, f"EASE's weights of the items of {history!r}, ridge {ridge:g}")
    return {**sections, "seconds": time.perf_counter() - begin, "cached": False}


def _counts(config: TrainConfig, schema: Schema, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """How often users turned to each item in training, and how many lines have it, (rows,) int64 each.

    Histories count only where they are all that is trained of a user: elsewhere their items are those of other lines.
    """
    assert schema.folder is not None  # as ``popular_items`` has seen
    counts, lines = np.zeros((2, table.rows), np.int64)
    split, whole = Split(schema.folder, schema, "train"), _whole(schema)
    for columns in split.read(split.blocks):
        turned_to = _turned_to(schema, columns)
        # ``add.at`` takes the time of a block's items, and not of all rows.
        np.add.at(lines, _items(config, columns), 1)
        np.add.at(counts, _items(config, turned_to), 1)
        if whole and ranking_kind(config.model).history(config.model):
            np.add.at(counts, _pairs(_history(config, turned_to))[1], 1)
    return counts, lines


def transitions(config: TrainConfig, schema: Schema, table: Table) -> Pairs:
    """How often each item came right after another in training; of a long log, in the last lines of it.

    A line has its own item after the last one of its history. Of a dataset that is split by leave-one-out, which trains
    only on each user's last line, the neighbours in the history count, too: they are the items of the lines before.

    Args:
      config: The run's configuration, of a model with a history.
      schema: The features that the model reads, read from a folder.
      table: The table of the items.

    Raises:
      DatasetError: If the dataset cannot be read.
    """
    whole = _whole(schema)
    assert schema.folder is not None  # as ``popular_items`` has seen
    split, read = Split(schema.folder, schema, "train"), 0
    merged, waiting = Pairs.merged([]), list[Pairs]()
    for columns in _positive(schema, split.read(reversed(split.blocks))):
        lists, items = _history(config, columns), _items(config, columns)
        before, after = neighbours(lists, items) if whole else (_last(lists), items)
        waiting.append(Pairs.counted(before[before >= 0], after[before >= 0], table.rows))
        # As many as were merged before, so that each pair is sorted a few times and not once a block.
        if sum(len(piece.keys) for piece in waiting) > max(_MERGED, len(merged.keys)):
            merged, waiting = Pairs.merged([merged, *waiting]), []
        read += len(before)
        if read >= _PAIRS:
            break
    return Pairs.merged([merged, *waiting])


def _whole(schema: Schema) -> bool:
    """Whether a training example is all that is trained of its user."""
    options = schema.preparation.get("options", {})
    return isinstance(options, Mapping) and options.get("split_by") == LEAVE_ONE_OUT


def _ease(config: TrainConfig, schema: Schema, candidates: np.ndarray) -> tuple[Ease, float]:
    """EASE of the last training examples, with the ridge that ranks valid's first items best, or the middle one."""
    assert schema.folder is not None  # as ``popular_items`` has seen
    split, whole, read = Split(schema.folder, schema, "train"), _whole(schema), 0.0
    shared = SharedUsers(len(candidates), whole=whole)
    for columns in _positive(schema, split.read(reversed(split.blocks))):
        items, history = _items(config, columns), _pairs(_history(config, columns))
        shared.add(history, items)
        # A pair that is counted by itself takes the time of about so many multiplications.
        read += len(items) * float(len(candidates)) ** 2 if whole else 1_000 * len(history[1])
        if read > _COUNTED:
            break
    if not _has_items(config, schema, "valid"):
        return Ease(shared.counts, RIDGES[1], candidates=candidates), RIDGES[1]

    most = _rankable(config, schema, len(candidates)) / len(RIDGES)

    def quality(order: Ease) -> float:
        return evaluated(_scores(config, schema, order, "valid", most)).to_dict()[f"ndcg@{config.evaluate.at[0]}"]

    orders = [Ease(shared.counts, ridge, candidates=candidates) for ridge in RIDGES]
    return max(zip(orders, RIDGES, strict=True), key=lambda pair: quality(pair[0]))


def _rankable(config: TrainConfig, schema: Schema, rows: int) -> float:
    """How many examples EASE ranks in the time that it may take."""
    history = feature_named(schema, ranking_kind(config.model).history(config.model), "history")
    return _RANKED / rows / max(history.max_length, 1)


def neighbours(lists: ListColumn, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every item of each list with the next one, the last with the example's own: (n,) int64 each.

    Args:
      lists: Of ``examples`` examples, rows.
      items: (examples,) rows, what follows each list.
    """
    lengths = np.diff(lists.offsets)
    values = lists.values[lists.offsets[0] : lists.offsets[-1]].astype(np.int64)
    after = np.append(values[1:], 0)
    after[(np.cumsum(lengths) - 1)[lengths > 0]] = items[lengths > 0]
    return values, after[: len(values)]


def _scores(
    config: TrainConfig, schema: Schema, order: ItemOrder | Ease, split: str, most: float = math.inf
) -> RankScores:
    """The ranks of a split's examples by an order of items; of no further blocks once there are ``most``."""
    assert schema.folder is not None  # as ``popular_items`` has seen
    blocks, ranks = Split(schema.folder, schema, split), list[np.ndarray]()
    for columns in _positive(schema, blocks.read(blocks.blocks)):
        ranks.append(_ranks(config, order, columns))
        if sum(map(len, ranks)) >= most:
            break
    candidates = int(order.candidates.sum())
    return RankScores(ranks=np.concatenate(ranks), candidates=candidates, at=config.evaluate.at)


def _has_items(config: TrainConfig, schema: Schema, split: str) -> bool:
    """Whether a split has an example that a user turned to."""
    if schema.folder is None or split not in schema.splits:
        return False
    blocks = Split(schema.folder, schema, split)
    return any(_items(config, columns).size for columns in _positive(schema, blocks.read(blocks.blocks)))


def _positive(schema: Schema, blocks: Iterator[Mapping[str, Column]]) -> Iterator[Mapping[str, Column]]:
    """``_turned_to`` of some blocks."""
    return (_turned_to(schema, columns) for columns in blocks)


def _turned_to(schema: Schema, columns: Mapping[str, Column]) -> Mapping[str, Column]:
    """The examples that a user turned to: of a dataset with labels, items of label 1."""
    return gather_all(columns, np.flatnonzero(np.asarray(columns[LABEL]) > 0)) if schema.labels else columns


def _ranks(config: TrainConfig, order: ItemOrder | Ease, columns: Mapping[str, Column]) -> np.ndarray:
    """(examples,) int32: how many other candidates come before or beside an example's item."""
    items, nothing = _items(config, columns), np.empty(0, np.int64)
    history = left_out = (nothing, nothing)
    repeated = np.zeros(len(items), bool)
    if ranking_kind(config.model).history(config.model):
        history = example, past = _pairs(_history(config, columns))
        if config.evaluate.leave_out_history:
            left_out = history
            repeated[example[past == items[example]]] = True
    above = order.ranks(items, history=history, left_out=left_out)
    return np.where(order.candidates[items], np.where(repeated, LEFT_OUT, above), NEVER).astype(np.int32)


def _items(config: TrainConfig, columns: Mapping[str, Column]) -> np.ndarray:
    return np.asarray(columns[ranking_kind(config.model).item(config.model)]).astype(np.int64)


def _history(config: TrainConfig, columns: Mapping[str, Column]) -> ListColumn:
    lists = columns[ranking_kind(config.model).history(config.model)]
    assert isinstance(lists, ListColumn)  # as ``ModelKind.schema`` has it
    return lists


def _pairs(lists: ListColumn) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of examples and rows, (n,) int64 each, in order."""
    example = np.repeat(np.arange(count_examples(lists)), np.diff(lists.offsets))
    return example, lists.values[lists.offsets[0] : lists.offsets[-1]].astype(np.int64)


def _last(lists: ListColumn) -> np.ndarray:
    """(examples,) int64, the last item of each list, -1 of an empty one."""
    last = np.full(count_examples(lists), -1, np.int64)
    filled = np.diff(lists.offsets) > 0
    last[filled] = lists.values[lists.offsets[1:][filled] - 1]
    return last
