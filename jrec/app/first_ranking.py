"""A first configuration for a dataset with histories: a model of the next item, sizes and rates by its numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import override

import numpy as np

from jrec.app.baselines.examples import lists_of
from jrec.app.first_rules import Choice, Key, Metric, Rules, training_sample
from jrec.app.models.ranking import check_ranked
from jrec.data.schema import CategoricalFeature, Schema
from jrec.errors import ConfigError

_POSITIONS = 5_000_000  # of histories that a trial reads: 1 to 3 minutes of two cores
_PASSES, _MOST_POSITIONS = 10, 40_000_000  # by a trial of more histories: after fewer passes scores say little
_STEPS = 50  # between evaluations at least: fewer change a model less than its score is uncertain
_PATIENT = 6
_AT = (10, 50)
_BATCH = 128
_NEGATIVES = 1024  # of every position
_ALL = 20_000  # items, up to which telling positions from all of them pays
_FEW = 4_000  # examples, below which a pass by batches of 128 has too few steps to learn much
_SCORED = 10_000  # valid examples that an evaluation ranks for at most
EVAL_BATCH = 512
"""Valid examples that are ranked for at once, by which ``watch`` counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingRules[C: Choice](Rules[C]):
    """Facts of a dataset for a model that ranks items, and how such models are judged."""

    @property
    @override
    def metric(self) -> Metric:
        k = _AT[0]
        return Metric(key=f"ndcg@{k}", name=f"NDCG@{k}", unit="0 to 1", greater=True, beside=(f"hr@{k}", f"HR@{k}"))

    def watch(self, steps: int, epochs: int) -> Iterator[Key]:
        """The keys of evaluations while it trains."""
        every = max(_STEPS, steps * epochs // 50)
        some = min(-(-self.valid // EVAL_BATCH), -(-_SCORED // EVAL_BATCH))
        yield Key(section="evaluate", name="at", value=list(_AT))
        yield Key(section="evaluate", name="every_steps", value=every)
        yield Key(
            section="evaluate", name="batches", value=some, reason=f"of the valid split's {self.valid:,} examples"
        )
        why = f"{self.metric.name}; {_PATIENT} evaluations without a better one end training"
        stop = {"metric": "ndcg", "patience": _PATIENT}
        yield Key(section="evaluate", name="early_stopping", value=stop, reason=why)
        yield Key(section="checkpoint", name="keep_best", value=True, reason="the report is of the best step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryFacts(RankingRules["Encoder"]):
    """What the rules depend on.

    Attributes:
      history: The feature with the histories.
      item: The feature with the item that follows.
      items: Rows of their table.
      length: Items that a history has at most.
      mean_length: And on average.
      aged: Whether it is known how long ago they were.
    """

    history: str
    item: str
    items: int
    length: int
    mean_length: float
    aged: bool

    @property
    def batch(self) -> int:
        """Histories of a batch."""
        return _BATCH if self.examples >= _FEW else _BATCH // 4

    @property
    @override
    def summary(self) -> str:
        return (
            f"{self.examples:,} training histories of {self.items:,} items, {self.mean_length:,.1f} of them on average,"
            f" {self.length:,} at most."
        )

    @override
    def candidates(self) -> list[Encoder]:
        drawn = _NEGATIVES // self.batch
        hstu = Encoder(name="HSTU", kind="hstu", ages=False, sampled=drawn)
        every = [hstu.told_from_all()] if self.items <= _ALL else []
        timed = [dataclasses.replace(hstu, name="HSTU, with the times between items", ages=True)] if self.aged else []
        return [*timed, hstu, *every, Encoder(name="SASRec", kind="sasrec", ages=False, sampled=drawn)]

    @property
    @override
    def trial_examples(self) -> int:
        few, most = (-(-positions // self.length) for positions in (_POSITIONS, _MOST_POSITIONS))
        return max(few, min(_PASSES * self.examples, most))

    @override
    def config(self, path: str, candidate: Encoder, *, best_step: int = 0) -> list[Key]:
        del best_step  # Adam's rate stays: NDCG wavers, and its best step says little
        batch, steps = self.batch, -(-self.examples // self.batch)
        epochs = next(number for limit, number in _EPOCHS if self.examples < limit)
        stops = "early stopping ends it sooner" if self.valid else ""
        of_batch = f"histories: {steps:,} steps an epoch of {self.examples:,}"
        keys = [
            Key(section="", name="epochs", value=epochs, reason=stops),
            Key(section="data", name="path", value=path),
            Key(section="data", name="batch_size", value=batch, reason=of_batch),
            Key(section="data", name="eval_batch_size", value=EVAL_BATCH),
            Key(section="model", name="kind", value=candidate.kind, reason=candidate.name),
            Key(section="model", name="embedding_dim", value=candidate.dim),
            Key(section="model", name="dropout", value=candidate.dropout),
            Key(section="model.sequence", name="history", value=self.history),
            Key(section="model.sequence", name="item", value=self.item),
            Key(section="model.sequence", name="blocks", value=candidate.blocks),
            *_negatives(batch, candidate),
        ]
        if self.aged and candidate.kind == "hstu":
            why = "how long ago an item was" if candidate.ages else "the order of items alone"
            keys.append(Key(section="model.sequence", name="ages", value=candidate.ages, reason=why))
        for section in ("optimizer", "optimizer.embedding"):
            keys.append(Key(section=section, name="name", value="adam"))
            keys.append(Key(section=section, name="learning_rate", value=candidate.rate))
        return [*keys, *(self.watch(steps, epochs) if self.valid else ())]

    @override
    def table(self) -> list[tuple[str, float, str]]:
        return [
            ("training examples", self.examples, "count"),
            ("valid examples", self.valid, "count"),
            ("items", self.items, "count"),
            ("items of a history", self.mean_length, "on average"),
            ("items of a history", self.length, "at most"),
        ]


_EPOCHS = ((200_000, 100), (5_000_000, 10), (float("inf"), 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder(Choice):
    """An encoder of histories.

    Attributes:
      kind: "hstu" or "sasrec".
      ages: Whether it reads how long ago items were.
      dim: Elements of an embedding.
      blocks: Layers.
      dropout: Of the layers.
      rate: The learning rate, of rows and of dense parameters.
      sampled: Items drawn for each example; 0 where positions are told from all items.
    """

    kind: str
    ages: bool
    sampled: int
    dim: int = 64
    blocks: int = 2
    dropout: float = 0.2
    rate: float = 0.001

    def told_from_all(self) -> Encoder:
        """The same, trained by the softmax over all items."""
        return dataclasses.replace(self, name=f"{self.name}, told from all items", sampled=0)

    @override
    def variants(self) -> Iterator[Encoder]:
        for factor in (2.0, 0.5):
            yield self.changed("rate", f"rate {factor * self.rate:.3g}", rate=factor * self.rate)
        for dropout in (value for value in (0.5, 0.2, 0.0) if value != self.dropout):
            yield self.changed("dropout", f"dropout {dropout:g}", dropout=dropout)
        for dim in (2 * self.dim, self.dim // 2):
            if 16 <= dim <= 256:
                yield self.changed("dim", f"dim {dim}", dim=dim)
        for blocks in (value for value in (4, 2, 1) if value != self.blocks):
            yield self.changed("blocks", f"{blocks} layers", blocks=blocks)
        for sampled in (4 * self.sampled, self.sampled // 4) if self.sampled else ():
            yield self.changed("sampled", f"{sampled} items drawn for each example", sampled=sampled)


def _negatives(batch: int, candidate: Encoder) -> Iterator[Key]:
    if candidate.sampled:
        why = f"for each example: {batch * candidate.sampled:,} of a batch are the negatives of every position"
        yield Key(section="model.sequence", name="sampled", value=candidate.sampled, reason=why)
    else:
        why = "the softmax that drawn items estimate: a step takes longer and learns more"
        yield Key(section="model.sequence", name="negatives", value="all", reason=why)


def facts_of(folder: str | os.PathLike[str], schema: Schema) -> HistoryFacts:
    """Reads what the rules depend on: the schema, and some blocks of the training split.

    Raises:
      ConfigError: If the dataset has no training examples or no history, or its items cannot be ranked.
      DatasetError: If a block cannot be read.
    """
    history, item = _history_of(folder, schema)
    table = schema.table(item.table)
    check_ranked(table, "hstu")
    counts, columns = training_sample(folder, schema)
    lengths = [lists_of(block, history)[0] for block in columns]
    return HistoryFacts(
        **counts,
        history=history.name,
        item=item.name,
        items=table.rows - (table.oov_row is not None),
        length=history.max_length,
        mean_length=float(np.mean(np.concatenate(lengths))),
        aged=bool(history.aged),
    )


def _history_of(folder: str | os.PathLike[str], schema: Schema) -> tuple[CategoricalFeature, CategoricalFeature]:
    """The history of the table with the most rows, and the feature of the same table with one item."""
    single = {feature.table: feature for feature in reversed(schema.categorical) if feature.one_hot}
    pairs = [(f, single[f.table]) for f in schema.categorical if not f.one_hot and not f.scaled and f.table in single]
    if not pairs:
        raise ConfigError(
            f"{folder} has no history of a user's items beside a feature with the next item"
            f"{'' if schema.labels else ', and no labels'}, so `jrec init` knows no model for it; prepare it with a"
            ' label column, or with history = {by = "user", of = "item", length = 200} in its schema'
            " (docs/next_item.md), or name the feature to rank by those of a user (--two-towers item)"
        )
    return max(pairs, key=lambda pair: schema.table(pair[0].table).rows)
