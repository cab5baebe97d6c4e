"""How many inputs are hot at every threshold, from some blocks of the dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.access.count import Block
from jrec.access.profile import TableProfile
from jrec.data.schema import Schema


class InputSample:
    """The least accessed row of every example of some blocks: an example is hot where that row is.

    Args:
      folder, schema: The dataset.
      blocks: Blocks of its training split.
      profiles: The accesses of tables whose rows may be cold; others are hot as a whole.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: Schema,
        blocks: Sequence[Block],
        profiles: Mapping[str, TableProfile],
    ):
        from jrec.data.blocks import ListColumn, ShardReader

        readers = [ShardReader(folder, shard) for shard in schema.splits["train"].shards]
        self._least: list[np.ndarray] = []
        for shard, block in blocks:
            columns = readers[shard].read(block)
            label = columns["label"]
            least = np.full(len(label.offsets) - 1 if isinstance(label, ListColumn) else len(label), np.inf)
            for feature in schema.categorical:
                if feature.table not in profiles:
                    continue
                column, profile = columns[feature.name], profiles[feature.table]
                if not isinstance(column, ListColumn):
                    np.minimum(least, profile.count_of(column), out=least)
                    continue
                example = np.repeat(np.arange(len(least)), np.diff(column.offsets))
                np.minimum.at(least, example, profile.count_of(column.values))
            self._least.append(np.sort(least))

    @property
    def inputs(self) -> int:
        """How many examples there are."""
        return sum(map(len, self._least))

    def share(self, cutoff: float) -> tuple[float, float]:
        """The share of hot examples, and its standard error over blocks (0 of a single block)."""
        hot = np.array([len(b) - np.searchsorted(b, cutoff, side="left") for b in self._least])
        sizes = np.array([len(b) for b in self._least])
        share = float(hot.sum() / sizes.sum())
        if len(sizes) == 1:
            return share, 0.0
        spread = ((hot - share * sizes) ** 2).sum() / (len(sizes) - 1) * len(sizes)
        return share, float(np.sqrt(spread) / sizes.sum())
