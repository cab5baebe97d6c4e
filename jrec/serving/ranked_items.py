"""The items that an export ranks: their values, and where their vectors are."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import numpy as np

from jrec.data.columns import ListColumn
from jrec.serving.encode import item_rows, item_values
from jrec.serving.format import Manifest, Retrieval
from jrec.serving.ids import Ids

if TYPE_CHECKING:
    from jrec.serving.answers import Item


class RankedItems:
    """The items of an export, whose vectors are rows of ``retrieval.table``, or of the items' own table.

    Args:
      folder: The export.
      manifest: Its manifest.
      retrieval: How its model ranks.

    Attributes:
      retrieval: As given.

    Raises:
      DatasetError: If the vocabulary is damaged.
      ExportError: If ``items.npy`` is.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, retrieval: Retrieval):
        self.retrieval = retrieval
        self._values = item_values(folder, manifest, retrieval.item_table)
        self._rows = item_rows(folder, manifest, self._values) if retrieval.items else None

    def named(self, places: np.ndarray) -> list[Item]:
        """The values of items by their places in the ranked table; rows of a table without a vocabulary."""
        rows = places if self._rows is None else self._rows[places]
        return rows.tolist() if self._values is None else self._values.take(rows).to_pylist()

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Places in the ranked table of rows of the items' own table; -1 of items that have no vector."""
        if self._rows is None:
            return rows
        place = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        return np.where(self._rows[place] == rows, place, -1)

    def ranked(self, count: int) -> np.ndarray:
        """The places that may be among the best, of a ranked table of ``count`` rows."""
        row = self.retrieval.left_out_row
        return np.arange(count) if row is None else np.delete(np.arange(count), row)

    def left_out(self, history: Ids | None, examples: int) -> np.ndarray:
        """(examples, n) places that are left out of rankings, -1 for none."""
        left_out = np.full((examples, 0), -1, np.int64)
        if history is not None and self.retrieval.leaves_out_history:
            length = history.values.shape[1] if history.offsets is None else np.diff(history.offsets).max(initial=0)
            left_out, _ = history.padded(int(length))
        left_out = self.places(left_out)
        if (row := self.retrieval.left_out_row) is None:
            return left_out
        return np.concatenate([left_out, np.full((examples, 1), row, np.int64)], axis=1)

    def candidates(self, rows: ListColumn) -> ListColumn:
        """Places of rows of the items' own table; -1 of items that are never ranked."""
        places = self.places(rows.values)
        if (row := self.retrieval.left_out_row) is not None:
            places = np.where(places == row, -1, places)
        return ListColumn(rows.offsets, places)
