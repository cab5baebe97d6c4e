"""A first configuration for retrieval by two towers: which features are of the item, and sizes and rates by numbers."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import override

import numpy as np

from jrec.app.first_ranking import EVAL_BATCH, RankingRules
from jrec.app.first_rules import Choice, Key, training_sample
from jrec.app.models.ranking import check_ranked
from jrec.data.columns import Column, ListColumn
from jrec.data.schema import Schema
from jrec.errors import ConfigError

_OF_ITEM, _OF_USER = 0.95, 0.5
"""Agreement of two examples of one item, 1 where it decides the value and 0 where it says nothing: from the first on a
feature is the item's, up to the second the user's or the moment's; in between the user's where a user decides it."""
_BATCHES = ((50_000, 128), (500_000, 512), (float("inf"), 2048))
_EPOCHS = ((200_000, 40), (5_000_000, 10), (float("inf"), 1))
_PASSES, _MOST = 10, 2_000_000  # examples of a trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerFacts(RankingRules["Towers"]):
    """What the rules depend on.

    Attributes:
      id: The feature that is ranked.
      item: The features that an item decides, ``id`` first.
      user: The other features.
      unclear: Features of which neither can be said, which no tower reads.
      history: A list of a user's items among ``user``; "" for none.
      items: Rows of the items' table.
    """

    id: str
    item: tuple[str, ...]
    user: tuple[str, ...]
    unclear: tuple[str, ...]
    history: str
    items: int

    @property
    @override
    def summary(self) -> str:
        return (
            f"{self.examples:,} training examples of {self.items:,} items, {len(self.user)} features of users and"
            f" {len(self.item)} of items."
        )

    @override
    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        if self.unclear:
            yield (
                f"{', '.join(self.unclear)}: neither the same in all examples of an item nor free of it, so that no"
                " tower reads it; add what is known of a user before items are ranked to model.two_tower.user, and what"
                " is an item's own, as of its last example, to model.two_tower.item."
            )

    @override
    def candidates(self) -> list[Towers]:
        deep = Towers(name="towers of two layers", layers=2)
        return [
            deep,
            dataclasses.replace(deep, name="towers of one layer", layers=1),
            dataclasses.replace(deep, name="towers of two layers, frequent items pushed away", log_q=False),
        ]

    @property
    @override
    def trial_examples(self) -> int:
        return min(_PASSES * self.examples, _MOST)

    @override
    def config(self, path: str, candidate: Towers, *, best_step: int = 0) -> list[Key]:
        del best_step  # Adam's rate stays: NDCG wavers, and its best step says little
        batch = next(size for limit, size in _BATCHES if self.examples < limit)
        steps, epochs = -(-self.examples // batch), next(number for limit, number in _EPOCHS if self.examples < limit)
        left_out = "items of it are left out of the ranking" if self.history else ""
        negatives = "the other examples' items are what an example's own is told from"
        section, width = "model.two_tower", 2 * candidate.dim
        keys = [
            Key(section="", name="epochs", value=epochs, reason="early stopping ends it sooner" if self.valid else ""),
            Key(section="data", name="path", value=path),
            Key(section="data", name="batch_size", value=batch, reason=negatives),
            Key(section="data", name="eval_batch_size", value=EVAL_BATCH),
            Key(section="model", name="kind", value="two_tower", reason=candidate.name),
            Key(section="model", name="embedding_dim", value=candidate.dim),
            Key(section="model", name="pooling", value="mean", reason="of lists: their length says nothing by itself"),
            Key(section="model", name="dropout", value=candidate.dropout),
            Key(section=section, name="user", value=list(self.user), reason="what a request has"),
            Key(section=section, name="item", value=list(self.item), reason="what is the same in all examples of one"),
            Key(section=section, name="id", value=self.id, reason=f"one of {self.items:,} is found"),
            Key(section=section, name="history", value=self.history, reason=left_out),
            *(
                Key(section=section, name=f"{side}_mlp", value=[width] * (candidate.layers - 1) + [candidate.dim])
                for side in ("user", "item")
            ),
            Key(section=section, name="temperature", value=candidate.temperature),
            Key(section=section, name="log_q", value=candidate.log_q),
            Key(section="optimizer", name="name", value="adam"),
            Key(section="optimizer", name="learning_rate", value=candidate.rate),
            Key(section="optimizer.embedding", name="name", value="adam"),
            Key(section="optimizer.embedding", name="learning_rate", value=candidate.rows),
        ]
        return [*keys, *(self.watch(steps, epochs) if self.valid else ())]

    @override
    def table(self) -> list[tuple[str, float, str]]:
        return [
            ("training examples", self.examples, "count"),
            ("valid examples", self.valid, "count"),
            ("items", self.items, "count"),
            ("features of users", len(self.user), "count"),
            ("features of items", len(self.item), "count"),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Towers(Choice):
    """Two towers.

    Attributes:
      layers: Of each.
      dim: Elements of an embedding, and of the vectors.
      temperature: What cosines are divided by.
      log_q: Whether frequent items are not pushed away for being negatives often.
      dropout: Of the layers.
      rate, rows: The learning rates of layers and of rows.
    """

    layers: int
    dim: int = 64
    temperature: float = 0.1
    log_q: bool = True
    dropout: float = 0.0
    rate: float = 0.001
    rows: float = 0.003

    @override
    def variants(self) -> Iterator[Towers]:
        for temperature in (value for value in (0.05, 0.1, 0.2) if value != self.temperature):
            yield self.changed("temperature", f"temperature {temperature:g}", temperature=temperature)
        for factor in (2.0, 0.5):
            yield self.changed("rows", f"rows' rate {factor * self.rows:.3g}", rows=factor * self.rows)
        for dim in (2 * self.dim, self.dim // 2):
            if 16 <= dim <= 256:
                yield self.changed("dim", f"dim {dim}", dim=dim)
        for dropout in (value for value in (0.2, 0.0) if value != self.dropout):
            yield self.changed("dropout", f"dropout {dropout:g}", dropout=dropout)
        for factor in (2.0, 0.5):
            yield self.changed("rate", f"dense rate {factor * self.rate:.3g}", rate=factor * self.rate)


def facts_of(folder: str | os.PathLike[str], schema: Schema, item: str) -> TowerFacts:
    """Reads what the rules depend on: the schema, and some blocks of the training split.

    Args:
      folder: The dataset.
      schema: Its schema.
      item: The feature whose values are ranked.

    Raises:
      ConfigError: If there is no such feature of one id, its items cannot be ranked, the dataset has no training
        examples, or nothing is left for the user's tower.
      DatasetError: If a block cannot be read, or a table grows.
    """
    singles = [feature.name for feature in schema.categorical if feature.one_hot]
    if item not in singles:
        raise ConfigError(
            f"--two-towers is {item!r}, but must be a feature of {folder} with one id an example, whose values are"
            f" ranked: {', '.join(singles) or 'there is none'}"
        )
    ranked = next(feature for feature in schema.categorical if feature.name == item)
    table = schema.table(ranked.table)
    check_ranked(table, "two_tower")
    schema.check_numbered("model.kind is 'two_tower', which reads tables of as many rows throughout")
    counts, columns = training_sample(folder, schema)
    of_table = [feature for feature in schema.categorical if feature.table == ranked.table]
    lists = [feature for feature in of_table if not feature.one_hot and not feature.scaled]
    history = max(lists, key=lambda feature: feature.max_length).name if lists else ""
    named = {
        feature.name: np.concatenate([_values_of(block, feature.name) for block in columns])
        for feature in (*schema.categorical, *schema.dense)
    }
    clear = _sides(named, item, [feature.name for feature in of_table], singles)
    if not {feature.name for feature in schema.categorical} & {*clear["user"]}:
        raise ConfigError(
            f"no categorical feature of {folder} is left for the user's tower: {item} decides"
            f" {', '.join(clear['item'][1:]) or 'none'}{_unclear(clear['unclear'])}; prepare it with what is known of"
            " users (docs/two_towers.md)"
        )
    return TowerFacts(
        **counts,
        id=item,
        item=tuple(clear["item"]),
        user=tuple(clear["user"]),
        unclear=tuple(clear["unclear"]),
        history=history,
        items=table.rows - (table.oov_row is not None),
    )


def _sides(
    columns: Mapping[str, np.ndarray], item: str, of_table: Sequence[str], singles: Sequence[str]
) -> dict[str, list[str]]:
    """The names of columns by tower, "item" or "user", or "unclear"; ``of_table`` have a user's other items."""
    by_item = _pairs(columns[item])
    agreement = {name: _agreement(values, *by_item) for name, values in columns.items() if name not in of_table}
    clear: dict[str, list[str]] = {"item": [item], "user": [], "unclear": []}
    # What has an agreement like a user's own number may decide what also goes with an item, as a country does.
    users = [_pairs(columns[name]) for name in singles if agreement.get(name, 1.0) <= _OF_USER]
    for name, values in columns.items():
        if name in of_table:
            side = "user"
        elif agreement[name] >= _OF_ITEM:
            side = "item"
        else:
            user = agreement[name] <= _OF_USER or any(_agreement(values, *pairs) >= _OF_ITEM for pairs in users)
            side = "user" if user else "unclear"
        if name != item:
            clear[side].append(name)
    return clear


def _unclear(names: Sequence[str]) -> str:
    return f", and of {', '.join(names)} it cannot be said whether it does" if names else ""


def _pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of examples, (n,) each, so that the two of a pair have one value."""
    order = np.argsort(values, kind="stable")
    same = values[order][1:] == values[order][:-1]
    return order[:-1][same], order[1:][same]


def _agreement(values: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """By how much more the two of a pair agree than any two do, of 1; 0 where there is no pair."""
    if not first.size:
        return 0.0
    _, counts = np.unique(values, return_counts=True)
    by_chance = float(((counts / len(values)) ** 2).sum())
    return (float((values[first] == values[second]).mean()) - by_chance) / max(1 - by_chance, 1e-9)


def _values_of(block: Mapping[str, Column], name: str) -> np.ndarray:
    """A column as one value an example, equal for equal ones: of lists a hash."""
    column = block[name]
    if not isinstance(column, ListColumn):
        values = np.asarray(column)
        return values if values.ndim == 1 else np.array([hash(line.tobytes()) for line in values])
    bounds = column.offsets.tolist()
    data, size = np.ascontiguousarray(column.values).tobytes(), column.values.itemsize
    return np.array([hash(data[begin * size : end * size]) for begin, end in itertools.pairwise(bounds)])
