"""Packs lines of a user and an item for ``jrec.nn.TwoTower``; either side may be missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import override

import numpy as np

from jrec.app.models.next_items import SEEN, TARGET, extra_column, with_named_extras
from jrec.batch import Batch
from jrec.data.blocks import WEIGHT_SUFFIX
from jrec.data.columns import Column, ListColumn, count_examples, matrix
from jrec.data.packers import PackerWrapper
from jrec.data.packing import EXAMPLE, Packer, Where
from jrec.data.packing_columns import PreparedColumns

LOG_Q = "log_q"


class UserItemPacker(PackerWrapper[Packer]):
    """Takes the place of a dataset's packer, and adds extras: the item, "target" (batch,), int32 rows.

    In training also "log_q" (batch,) float32, where that is given; in evaluation the items of the history, "seen"
    (batch, length), -1 for none. Missing columns are zeros or empty lists, as the items' columns are when only a user's
    vector is wanted; a missing item is -1.

    Args:
      packer: The dataset's (``dataset_packer``), whose extras are ``names``.
      item: The feature with the item.
      history: The feature whose items are "seen"; "" for none.
      log_q: (rows,) float32, of each row of the item's table; None for none.
    """

    def __init__(self, packer: Packer, *, item: str, history: str = "", log_q: np.ndarray | None = None):
        super().__init__(packer)
        self._item, self._history, self._log_q = item, history, log_q
        self._features = [config for config, _ in packer.layout.features]
        self._length = next((feature.max_length for feature in self._features if feature.name == history), 0)

    @staticmethod
    def names(*, training: bool, log_q: bool) -> tuple[str, ...]:
        """The extras, which the packer is made with."""
        extras = (TARGET, *((LOG_Q,) if log_q else ())) if training else (TARGET, SEEN)
        return tuple(map(extra_column, extras))

    @property
    @override
    def columns(self) -> list[str]:
        return [name for name in self._packer.columns if name not in self._packer.extras]

    @override
    def prepare(self, columns: Mapping[str, Column]) -> PreparedColumns:
        count = count_examples(next(iter(columns.values())))
        items = np.asarray(columns.get(self._item, np.full(count, -1)), np.int64)
        # ``pack`` fills SEEN: it has the history as a matrix, whose rows are of one length.
        target, seen = extra_column(TARGET), extra_column(SEEN)
        prepared: dict[str, Column] = {**columns, target: items, seen: np.zeros((count, 0), np.int64)}
        if self._log_q is not None:
            prepared[extra_column(LOG_Q)] = self._log_q.take(items, mode="clip")  # the packer refuses others
        for feature in (feature for feature in self._features if feature.name not in columns):
            each = feature.max_length if feature.fixed_length else 0
            offsets = np.arange(count + 1, dtype=np.int64) * each
            prepared[feature.name] = ListColumn(offsets, np.zeros(count * each, np.uint32))
            if feature.weighted:
                prepared[feature.name + WEIGHT_SUFFIX] = ListColumn(offsets, np.zeros(count * each, np.float32))
        # Of what a request or a catalogue does not have: labels, and the dense features of the other side.
        nothing = np.zeros(count, np.float32)
        return super().prepare({**dict.fromkeys(self._packer.columns, nothing), **prepared})

    @override
    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = EXAMPLE, *, number: int = 0) -> Batch:
        if self._history and extra_column(SEEN) in columns.extras:
            history = matrix(columns.ids[self._history], columns.examples, self._length)
            columns = dataclasses.replace(columns, extras={**columns.extras, extra_column(SEEN): history})
        return with_named_extras(super().pack(columns, batch_size, where, number=number))
