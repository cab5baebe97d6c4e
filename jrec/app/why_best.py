"""Which of a user's features, and of the items of a history, the score of a ranked item depends on most.

The item stays, and the user's vector is made anew without one feature, or without an item of the history wherever that
stands in it: the change is the cosine less what it then is. Only users are predicted again, so that the reasons for all
of an example's best items cost as much as those for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast, override

import numpy as np

from jrec.app.why import Explainer, Reasons, left_out
from jrec.data.columns import ListColumn, gather_all
from jrec.data.encoded_columns import EncodedColumns
from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.app.models.best import Best, RankingPredictor
    from jrec.app.models.predictor import Piece
    from jrec.app.why import Pairs


class BestExplainer(Explainer):
    """Leaves out one of the user's features after another, and in place of the history one of its items.

    Args:
      predictor: Ranks items for the examples.
      k: How many features and items are told of each ranked item; of users who have fewer, those.

    Raises:
      ConfigError: If a user has no history and fewer than ``k`` features, or a list whose values may not be missing.
    """

    def __init__(self, predictor: RankingPredictor, k: int):
        self._predictor: RankingPredictor = predictor
        config, schema = predictor.run.config, predictor.run.schema
        self._history = predictor.kind.history(config.model)
        features = predictor.kind.inputs(config.model, schema)
        super().__init__(predictor, [name for name in features if name != self._history], k, least=not self._history)
        if any(feature.fixed_length for feature in schema.categorical if feature.name == self._history):
            raise ConfigError(
                f"feature {self._history!r} has lists of one length (fixed_length), of which no item may be missing, so"
                " that no score can be told without one; prepare it without fixed_length"
            )

    @override
    def of_columns(self, columns: object, batch_size: int) -> Pairs:
        """The reasons for the best item of each example; none of an example for which no item is left."""
        predictor = self._predictor.at(1)
        encoded = predictor.encoder.columns(columns)
        best = predictor.piece(predictor.of_encoded(encoded, batch_size))
        there, reasons = best.rows[:, 0] >= 0, self._reasons(best, encoded, batch_size).at((slice(None), 0))
        return [pairs if item else [] for pairs, item in zip(reasons.pairs(), there.tolist(), strict=True)]

    @override
    def explained(self, piece: Piece, encoded: EncodedColumns | None, batch_size: int) -> Piece:
        best = cast("Best", piece)
        if encoded is not None:
            return dataclasses.replace(best, reasons=self._reasons(best, encoded, batch_size))
        nothing = np.zeros((*best.rows.shape, self.k))
        none = Reasons(names=(), features=nothing.astype(np.int64), changes=nothing.astype(np.float32))
        return dataclasses.replace(best, reasons=none)

    def _reasons(self, best: Best, encoded: EncodedColumns, batch_size: int) -> Reasons:
        """(examples, items, k) reasons for the best items of examples."""
        items = self._predictor.item_vectors(best.rows)
        encoded = dataclasses.replace(encoded, labels=None, tasks={})
        whole = self._scores(encoded, np.arange(len(items)), items, batch_size)
        lines, rows, place, most = self._history_items(encoded)
        # Of each example its features, then the items of its history; NaN where it has fewer of these than others.
        changes = np.full((*whole.shape, len(self.names) + most), np.nan, np.float32)
        for at, name in enumerate(self.names):
            without = left_out(encoded, self.blank, name)
            changes[:, :, at] = whole - self._scores(without, np.arange(len(items)), items, batch_size)
        for begin in range(0, len(lines), batch_size):
            own = slice(begin, begin + batch_size)
            without = _without_items(_lines(encoded, lines[own]), self._history, rows[own])
            scores = self._scores(without, lines[own], items, batch_size)
            changes[lines[own], :, len(self.names) + place[own]] = whole[lines[own]] - scores
        known, number = np.unique(rows, return_inverse=True)
        codes = np.full((len(items), changes.shape[-1]), -1, np.int64)
        codes[:, : len(self.names)] = np.arange(len(self.names))
        codes[lines, len(self.names) + place] = len(self.names) + number
        codes = np.broadcast_to(codes[:, None], changes.shape)
        # NaN sorts behind all numbers.
        order = np.argsort(-np.abs(changes), axis=-1, kind="stable")[..., : self.k]
        features, told = (np.take_along_axis(array, order, axis=-1) for array in (codes, changes))
        if (short := self.k - features.shape[-1]) > 0:
            fill = [(0, 0), (0, 0), (0, short)]
            features, told = np.pad(features, fill, constant_values=-1), np.pad(told, fill, constant_values=np.nan)
        return Reasons(names=(*self.names, *self._item_names(known)), features=features, changes=told)

    def _scores(self, encoded: EncodedColumns, lines: np.ndarray, items: np.ndarray, batch_size: int) -> np.ndarray:
        """(n, k) float32 cosines of n users with the items, (examples, k, dim), of the example that each is of."""
        return np.einsum("nd,nkd->nk", self._predictor.users_of(encoded, batch_size), items[lines])

    def _history_items(self, encoded: EncodedColumns) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The different items of the examples' histories: of each its example, its row and its number in the example.

        Also the greatest number of them in an example.
        """
        none = np.zeros(0, np.int64)
        if not self._history:
            return none, none, none, 0
        history = encoded.ids[self._history]
        assert isinstance(history, ListColumn)  # as the kind has checked
        lengths = np.diff(history.offsets).astype(np.int64)
        size = int(history.values.max(initial=0)) + 1
        lines, rows = np.divmod(np.unique(np.repeat(np.arange(len(lengths)), lengths) * size + history.values), size)
        counts = np.bincount(lines, minlength=len(lengths))
        place = np.arange(len(lines)) - np.repeat(np.cumsum(counts) - counts, counts)
        return lines, rows, place, int(counts.max(initial=0))

    def _item_names(self, rows: np.ndarray) -> Iterator[str]:
        """What items of the history are called: HISTORY=VALUE."""
        import pyarrow as pa

        values = self._predictor.values
        texts = rows.tolist() if values is None else values.take(pa.array(rows)).to_pylist()
        return (f"{self._history}={'?' if text is None else text}" for text in texts)


def _lines(encoded: EncodedColumns, lines: np.ndarray) -> EncodedColumns:
    """The examples of these numbers, without labels."""
    weights = {
        name: ListColumn(cast("ListColumn", encoded.ids[name]).offsets, w) for name, w in encoded.weights.items()
    }
    gathered = {name: cast("ListColumn", lists).values for name, lists in gather_all(weights, lines).items()}
    return dataclasses.replace(
        encoded, dense=encoded.dense[lines], ids=gather_all(encoded.ids, lines), weights=gathered
    )


def _without_items(encoded: EncodedColumns, history: str, rows: np.ndarray) -> EncodedColumns:
    """The examples, each without one row, of (examples,) rows, in its history."""
    lists = encoded.ids[history]
    assert isinstance(lists, ListColumn)
    owners = np.repeat(np.arange(len(rows)), np.diff(lists.offsets))
    keep = lists.values != rows[owners]
    lengths = np.bincount(owners[keep], minlength=len(rows))
    shorter = ListColumn(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), lists.values[keep])
    weights = {name: w[keep] if name == history else w for name, w in encoded.weights.items()}
    return dataclasses.replace(encoded, ids={**encoded.ids, history: shorter}, weights=weights)
