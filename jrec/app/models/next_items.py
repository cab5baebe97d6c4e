"""Packs histories for ``jrec.nn.NextItem``: what comes next at each position, and items that are drawn as negatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, override

import numpy as np

from jrec.batch import Batch
from jrec.data.blocks import WEIGHT_SUFFIX
from jrec.data.columns import Column, ListColumn, count_examples, matrix
from jrec.data.packers import PackerWrapper
from jrec.data.packing import EXAMPLE, CastPlace, OnBadId, Packer, Where
from jrec.data.packing_columns import PreparedColumns, join
from jrec.ops.layout import EmbeddingLayout

if TYPE_CHECKING:
    from jrec.nn.sequences import Negatives

NEXT, SAMPLED, TARGET, SEEN = "next", "sampled", "target", "seen"
"""Extras of batches: the first two in training, the others in evaluation."""
_WEIGHT = "/weight"  # of examples, 0 for those that fill up a batch; no feature has a name like this


def extra_column(name: str) -> str:
    """What columns to pack call an extra, beside features, any of which may have the extra's own name."""
    return f"/{name}"


def with_named_extras(batch: Batch) -> Batch:
    """The batch with its extras by their own names."""
    return dataclasses.replace(batch, extras={name.removeprefix("/"): array for name, array in batch.extras.items()})


def feature_names(history: str, item: str) -> tuple[str, str, str]:
    """What the layout calls the history, the items that come next, and those that are drawn.

    Args:
      history, item: The dataset's features.
    """
    return history, f"{item}.{NEXT}", f"{item}.{SAMPLED}"


class NextItemPacker(PackerWrapper[Packer]):
    """Takes the place of a dataset's packer: examples of a history and the item after it.

    The batch's ``dense`` are the ages of the history's items, (batch, length) float32, 0 behind their end; or nothing.

    In training the batch has for each position of a history the item that comes next, which is the history shifted by
    one with the item behind it, and the items to tell it from: both are features and extras, as
    ``jrec.nn.next_item_loss`` takes them. In evaluation these features have no lookup; extras are the item, "target"
    (batch,), and the history, "seen" (batch, length), int64 rows, -1 for none.

    Args:
      layout: The model's, with features of ``feature_names``, of pooling "none", as long as ``next_item_layout`` says.
      history, item: The dataset's features.
      rows: Rows of their table.
      oov_row: The row of items that the dataset does not tell apart, which is not drawn; None for none.
      seed: Of the drawn items, with the batch's number; None for evaluation.
      aged: Whether the history's weights are ages, which the model reads.
      negatives: As of ``jrec.nn.next_item_loss``.
      batch_size: Examples of a step in all processes, which share out the items where ``negatives`` is "all"; None for
        one process.
      on_bad_id: How out-of-range ids are handled.
      cast: Where the cast is computed.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        *,
        history: str,
        item: str,
        rows: int,
        oov_row: int | None,
        seed: int | None = None,
        aged: bool = False,
        negatives: Negatives = "batch",
        batch_size: int | None = None,
        on_bad_id: OnBadId = "raise",
        cast: CastPlace = "none",
    ):
        self._names, self._item = feature_names(history, item), item
        self._rows, self._oov_row, self._seed = rows, oov_row, seed
        self._negatives: Negatives = negatives
        self._batch_size = batch_size
        lengths = {config.name: config.max_length for config, _ in layout.features}
        self._length, self._drawn = (lengths[name] for name in self._names[::2])
        self._extras = tuple(map(extra_column, (TARGET, SEEN) if seed is None else (NEXT, SAMPLED)))
        self._ages = (history + WEIGHT_SUFFIX,) if aged else ()
        self._filled_up = seed is not None and negatives == "all"
        table = next(config.table for config, _ in layout.features)
        super().__init__(
            Packer(
                layout,
                dense=self._ages,
                label=None,
                weight=_WEIGHT if self._filled_up else None,
                extras=self._extras,
                on_bad_id=on_bad_id,
                oov_rows={table: oov_row},
                cast=cast,
            )
        )

    @property
    @override
    def columns(self) -> list[str]:
        return [self._names[0], *self._ages, self._item]

    @override
    def prepare(self, columns: Mapping[str, Any]) -> PreparedColumns:
        """Checks columns, and brings them into the form that ``pack`` reads.

        Args:
          columns: Lists of the history, and of its ages, and (examples,) items; in evaluation the items may be absent.
        """
        history, following, sampled = self._names
        lists: Column = columns[history]
        count = count_examples(lists)
        nothing = ListColumn(np.zeros(count + 1, np.int64), np.zeros(0, np.int64))
        items = np.asarray(columns.get(self._item, np.full(count, -1)), np.int64)
        extras = {name: np.zeros((count, 0), np.int64) for name in self._extras}  # ``pack`` makes them
        prepared = {history: lists, following: nothing, sampled: nothing} | extras
        prepared |= {name: matrix(columns[name], count, self._length, absent=0) for name in self._ages}
        if self._filled_up:
            prepared[_WEIGHT] = np.ones(count, np.float32)
        if self._seed is None:
            prepared[extra_column(TARGET)] = items
        else:
            assert isinstance(lists, ListColumn)  # as blocks have them
            prepared[following] = ListColumn(lists.offsets, _shifted(lists, items))
        return super().prepare(prepared)

    @override
    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = EXAMPLE, *, number: int = 0) -> Batch:
        """Packs examples into a batch; see ``Packer``. ``number`` says which items are drawn, or whose share it is."""
        history, following, sampled = self._names
        if self._seed is None:
            seen = matrix(columns.ids[history], columns.examples, self._length)
            extras = {**columns.extras, extra_column(SEEN): seen}
            return with_named_extras(super().pack(dataclasses.replace(columns, extras=extras), batch_size, where))
        if self._filled_up:
            # All items lie in the examples of a full batch, of which a short one has too few.
            columns = _with_empty(columns, batch_size)
        targets = matrix(columns.ids[following], columns.examples, self._length)
        drawn = self._draw(targets, batch_size, number)
        extras = dict(zip(self._extras, (targets, matrix(drawn, columns.examples, self._drawn)), strict=True))
        columns = dataclasses.replace(columns, ids={**columns.ids, sampled: drawn}, extras=extras)
        return with_named_extras(super().pack(columns, batch_size, where))

    def _draw(self, targets: np.ndarray, batch_size: int, number: int) -> Column:
        """What each example's targets, (examples, length), are told from: int64 rows."""
        random, examples = np.random.default_rng([self._seed or 0, number]), len(targets)
        if self._negatives == "batch":
            return self._not_unknown(lambda rows: random.integers(0, rows, (examples, self._drawn)))
        offsets = np.zeros(examples + 1, np.int64)
        if self._negatives == "position":
            np.cumsum(np.sum(targets >= 0, axis=1) * (self._drawn // self._length), out=offsets[1:])
            return ListColumn(offsets, self._not_unknown(lambda rows: random.integers(0, rows, offsets[-1])))
        # Of several processes each has a part of the items: their batches of a step have successive numbers.
        share = number % ((self._batch_size or batch_size) // batch_size)
        every = self._not_unknown(np.arange)
        places = np.minimum((share * batch_size + np.arange(examples + 1)) * self._drawn, len(every))
        return ListColumn(places - places[0], every[places[0] : places[-1]])

    def _not_unknown(self, numbered: Callable[[int], np.ndarray]) -> np.ndarray:
        """int64 rows of items that the dataset tells apart, ``numbered(how many)`` of them from 0."""
        if self._oov_row is None:
            return numbered(self._rows)
        numbers = numbered(self._rows - 1)
        return numbers + (numbers >= self._oov_row)


def _with_empty(columns: PreparedColumns, examples: int) -> PreparedColumns:
    """Columns with empty lists and zeros, an example's weight among them, up to a number of examples."""
    missing = examples - columns.examples
    nothing = ListColumn(np.zeros(missing + 1, np.int64), np.zeros(0, np.int64))
    empty = PreparedColumns(
        examples=missing,
        numbers={name: np.zeros((missing, *array.shape[1:]), array.dtype) for name, array in columns.numbers.items()},
        ids=dict.fromkeys(columns.ids, nothing),
        weights={name: array[:0] for name, array in columns.weights.items()},
        extras={name: np.zeros((missing, *array.shape[1:]), array.dtype) for name, array in columns.extras.items()},
    )
    return join([columns, empty])


def _shifted(lists: ListColumn, items: np.ndarray) -> np.ndarray:
    """For each element of the lists the one behind it, and behind the last one the example's item, int64."""
    shifted, lengths = np.empty(len(lists.values), np.int64), np.diff(lists.offsets)
    shifted[:-1] = lists.values[1:]
    shifted[lists.offsets[1:][lengths > 0] - 1] = items[lengths > 0]
    return shifted
