"""Puts the OOV row in the place of some ids in training, so that values which training never saw meet a trained row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, override

import numpy as np

from jrec.data.columns import Column, ListColumn
from jrec.data.packers import AnyPacker, PackerWrapper
from jrec.data.packing import EXAMPLE, Where
from jrec.data.packing_columns import PreparedColumns

_STREAM = 0x6F6F76  # "oov": sets the draws apart from others of the same seed


class OovIds(PackerWrapper[AnyPacker]):
    """Takes the place of a loader's packer: some ids of its batches become the OOV row of their table.

    Which ones depends only on the seed and the number of the batch, so that a resumed run draws the same, and so do
    one device and several.

    Args:
      packer: What packs the batches.
      oov_rows: By feature, the OOV row of its table; ids of other features stay.
      rate: The share of ids, 0 to 1, that are drawn, on average.
      seed: The seed of the draws.
    """

    def __init__(self, packer: AnyPacker, oov_rows: Mapping[str, int], *, rate: float, seed: int):
        super().__init__(packer)
        self._oov_rows, self._rate, self._seed = dict(oov_rows), rate, seed

    @override
    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = EXAMPLE, *, number: int = 0) -> Any:
        random = np.random.default_rng([self._seed, _STREAM, number])
        drawn = {name: self._drawn(columns.ids[name], row, random) for name, row in self._oov_rows.items()}
        columns = dataclasses.replace(columns, ids={**columns.ids, **drawn})
        return super().pack(columns, batch_size, where, number=number)

    def _drawn(self, column: Column, row: int, random: np.random.Generator) -> Column:
        """The column with ``row`` in the place of some of its ids; absent ones stay."""
        if isinstance(column, ListColumn):
            return column._replace(values=self._replaced(column.values, row, random))
        return self._replaced(column, row, random)

    def _replaced(self, ids: np.ndarray, row: int, random: np.random.Generator) -> np.ndarray:
        # As many as draws for all ids would hit, at places of which some come twice: that costs the hits, not all ids.
        places = random.integers(0, max(1, ids.size), random.binomial(ids.size, self._rate))
        replaced = ids.copy()
        flat = replaced.reshape(-1)
        flat[places] = np.where(flat[places] < 0, flat[places], row)
        return replaced
