"""Examples as sparse vectors: one slot a (feature, row), one a dense feature, and one for the bias."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jrec.data.blocks import EXAMPLE_WEIGHT, LABEL, Column, ListColumn, ShardReader, known_labels, weight_column
from jrec.data.columns import gather_all
from jrec.data.keys import buckets
from jrec.data.schema import CategoricalFeature, Schema

MAX_SLOTS = 1 << 21
"""Slots of one feature. Rows of a table descend by frequency, so what shares the last slot are its rarest rows."""
_CLIP = 6.0  # standard deviations of a dense feature

BlockAt = tuple[int, int]
"""The number of a shard in its split, and of a block in the shard."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """Some examples; example ``i`` has ``slots[offsets[i]:offsets[i + 1]]``.

    Attributes:
      offsets: (examples + 1,) int64 ascending from 0.
      slots: (offsets[-1],) uint32.
      values: (offsets[-1],) float32.
      labels: (examples,) bool.
      weights: (examples,) float32.
    """

    offsets: np.ndarray
    slots: np.ndarray
    values: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


class Split:
    """Blocks of a dataset's split: the examples that are scored, whose weight is not 0.

    Of a dataset with several labels they are those whose first label is known.

    Args:
      folder: The dataset.
      schema: Its description.
      split: "train", "valid" or "test".
    """

    def __init__(self, folder: str | os.PathLike[str], schema: Schema, split: str):
        self._tasks, self._weighted, self._numeric = bool(schema.tasks), schema.weighted, schema.numbers is not None
        self._readers = [ShardReader(folder, shard) for shard in schema.splits[split].shards]
        self.blocks: list[BlockAt] = [(s, b) for s, reader in enumerate(self._readers) for b in range(len(reader))]

    def read(self, blocks: Iterable[BlockAt]) -> Iterator[Mapping[str, Column]]:
        """The columns of some blocks, in their order."""
        for shard, block in blocks:
            columns = self._readers[shard].read(block)
            scored = np.ones(len(columns[LABEL]), bool)
            if self._tasks:
                scored &= known_labels(np.asarray(columns[LABEL]), numeric=self._numeric)
            if self._weighted:
                scored &= columns[EXAMPLE_WEIGHT] != 0
            yield columns if scored.all() else gather_all(columns, np.flatnonzero(scored))


def weights_of(columns: Mapping[str, Column]) -> np.ndarray:
    """(examples,) float32, ones where examples have no weights."""
    return np.asarray(columns.get(EXAMPLE_WEIGHT, np.ones(len(columns[LABEL]))), np.float32)


def lists_of(
    columns: Mapping[str, Column], feature: CategoricalFeature
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A categorical column's list lengths (examples,), ids, and the share of each id in its example's mean.

    The shares are None where every example has one id of share 1.
    """
    column = columns[feature.name]
    if not isinstance(column, ListColumn):
        return np.ones(len(column), np.int64), column, None
    lengths = np.diff(column.offsets)
    share = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
    if feature.scaled and (name := weight_column(feature)) and isinstance(weights := columns[name], ListColumn):
        share *= weights.values
    return lengths.astype(np.int64), column.values, share


def table_slots(schema: Schema, table: str) -> int:
    """How many slots a feature of a table has."""
    rows = schema.table(table).rows
    return min(1 << (2 * rows - 1).bit_length() if schema.table(table).growing else rows, MAX_SLOTS)


def slots_of(ids: np.ndarray, size: int) -> np.ndarray:
    """(n,) slots from 0 to ``size`` of rows, or of the keys (uint64) of a table that grows, which are hashed."""
    return buckets(ids, size) if ids.dtype == np.uint64 and size > 1 else np.minimum(ids, size - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelSums:
    """Sums of examples' weights, and of their labels by weight.

    Attributes:
      weight, label: Of all examples.
      by_feature: By categorical feature (2, slots) float64, both sums by its values; rare rows of a large table share a
        slot, and a value that a list weighs counts by that weight, too.
    """

    weight: float
    label: float
    by_feature: dict[str, np.ndarray]

    @staticmethod
    def of(schema: Schema, blocks: Iterable[Mapping[str, Column]]) -> LabelSums:
        """Of the examples of some blocks."""
        sizes = {f.name: table_slots(schema, f.table) for f in schema.categorical}
        sums = {name: np.zeros((2, size)) for name, size in sizes.items()}
        weight = total = 0.0
        for columns in blocks:
            each = weights_of(columns).astype(np.float64)
            label = np.asarray(columns[LABEL], np.float64) * each
            weight, total = weight + each.sum(), total + label.sum()
            for feature in schema.categorical:
                lengths, ids, share = lists_of(columns, feature)
                size = sizes[feature.name]
                slots, counted = slots_of(ids, size), np.ones(len(ids)) if share is None else np.maximum(share, 0)
                for row, values in enumerate((each, label)):
                    sums[feature.name][row] += np.bincount(slots, counted * np.repeat(values, lengths), size)
        return LabelSums(weight=weight, label=total, by_feature=sums)


class Slots:
    """Numbers the slots of a dataset, and turns its blocks into ``Examples``.

    Dense features are standardized by the blocks of ``moments`` and clipped at 6 standard deviations. The ids of a list
    count by their mean.

    Args:
      schema: The dataset's description.
      moments: Blocks of the training split; used where there are dense features.
    """

    def __init__(self, schema: Schema, moments: Iterable[Mapping[str, Column]]):
        self._dense = [f.name for f in schema.dense]
        self._categorical = schema.categorical
        sizes = [table_slots(schema, f.table) for f in schema.categorical]
        first = 1 + len(self._dense)
        self._first = np.cumsum([first, *sizes])
        self._mean, self._scale = _moments(self._dense, moments)

    @property
    def count(self) -> int:
        """All slots; slot 0 is the bias."""
        return int(self._first[-1])

    def of_block(self, columns: Mapping[str, Column]) -> Examples:
        """A block's examples."""
        labels = np.asarray(columns[LABEL]) > 0
        size, dense = len(labels), 1 + len(self._dense)
        lists = [lists_of(columns, feature) for feature in self._categorical]
        lengths = dense + sum((lengths for lengths, _, _ in lists), np.zeros(size, np.int64))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        slots, values = np.empty(offsets[-1], np.uint32), np.ones(offsets[-1], np.float32)
        at = offsets[:-1].copy()
        slots[at] = 0
        for number, name in enumerate(self._dense):
            at += 1
            slots[at] = 1 + number
            scaled = (np.asarray(columns[name], np.float64) - self._mean[number]) * self._scale[number]
            values[at] = np.clip(scaled, -_CLIP, _CLIP)
        at += 1
        for number, (lengths, ids, share) in enumerate(lists):
            begin, end = self._first[number : number + 2]
            places = at
            if share is not None:
                # Where an example's list begins, and from there its ids one after the other.
                places = np.repeat(at - np.cumsum(lengths) + lengths, lengths) + np.arange(len(ids))
                values[places] = share
            slots[places] = begin + slots_of(ids, end - begin)
            at = at + lengths
        return Examples(offsets=offsets, slots=slots, values=values, labels=labels, weights=weights_of(columns))


def _moments(names: list[str], blocks: Iterable[Mapping[str, Column]]) -> tuple[np.ndarray, np.ndarray]:
    """Means and reciprocal standard deviations, (features,) float64; 0 for a feature that is constant."""
    count, total, squares = 0, np.zeros(len(names)), np.zeros(len(names))
    if names:
        for columns in blocks:
            rows = np.stack([np.asarray(columns[name], np.float64) for name in names])
            count += rows.shape[1]
            total += rows.sum(1)
            squares += np.square(rows).sum(1)
    mean = total / max(count, 1)
    variance = np.maximum(squares / max(count, 1) - mean**2, 0)
    varies = variance > 1e-12 * np.maximum(mean**2, 1e-12)
    return mean, np.where(varies, 1 / np.sqrt(np.where(varies, variance, 1)), 0.0)
