"""The best items of users, by models that rank items."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, override

import jax
import numpy as np

from jrec.app.evaluate import RestoredRun
from jrec.app.models.named_candidates import candidate_pieces, types_with_candidates
from jrec.app.models.next_items import SEEN
from jrec.app.models.predictor import Piece, Predictor
from jrec.app.models.rank_items import ItemRanker
from jrec.app.why import Reasons
from jrec.app.why_best import BestExplainer
from jrec.batch import Batch
from jrec.data.columns import ListColumn
from jrec.data.encoded_columns import EncodedColumns
from jrec.data.unknown import UnknownValues
from jrec.data.vocabulary_file import table_values
from jrec.errors import ConfigError
from jrec.metrics import check_finite
from jrec.prepare.encoder import Encoder
from jrec.serving.answers import ByTask
from jrec.serving.candidates import CANDIDATES, NoCandidatesError, checked

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.app.config.typed_toml import Section
    from jrec.app.models.ranking import RankingKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best(Piece):
    """The best items for some examples that follow each other.

    Attributes:
      split, first: As of ``Piece``.
      scores: (n, k) float32, the best first; -inf where fewer items are left.
      rows: (n, k) integers, the items' rows; -1 there.
      values: The values of the items' table by row; None where it has no vocabulary.
      reasons: What the scores depend on most, (n, k, …); None where nobody asked.
    """

    split: str
    first: int
    scores: np.ndarray
    rows: np.ndarray
    values: pa.Array | None
    reasons: Reasons | None = None

    @property
    @override
    def examples(self) -> int:
        return len(self.rows)

    @override
    def columns(self) -> tuple[np.ndarray, dict[str, np.ndarray | pa.Array]]:
        """The columns rank (from 1), item and score, and why_1, …"""
        there = self.rows >= 0
        line, rank = np.nonzero(there)
        reasons = {} if self.reasons is None else self.reasons.at(there).columns()
        best = {"rank": (rank + 1).astype(np.int32), "item": self.items(there), "score": self.scores[there]}
        return line, {**best, **reasons}

    def items(self, which: np.ndarray | int) -> pa.Array:
        """The items at ``rows[which]``, null for -1; rows where the table has no vocabulary."""
        import pyarrow as pa

        rows = self.rows[which]
        chosen = pa.array(rows, mask=rows < 0)
        return chosen if self.values is None else self.values.take(chosen)


class RankingPredictor(Predictor[tuple[np.ndarray, np.ndarray]]):
    """The ``k`` best items of each example.

    Args:
      run: The run.
      kind: Its kind.
      k: How many items.
    """

    def __init__(self, run: RestoredRun, kind: RankingKind[Section], k: int = 10):
        super().__init__(run)
        self.kind: RankingKind[Section] = kind
        self._k = k

    @override
    def at(self, k: int | None) -> Self:
        most = self._ranker.candidates
        k = min(self._k, most) if k is None else k
        if not 1 <= k <= most:
            raise ConfigError(f"k is {k}, but must be between 1 and the {most:,} items that the run ranks")
        other = copy.copy(self)  # with what this one has cached
        other._k = k
        return other

    reads_every_parquet = True

    @functools.cached_property
    def _ranker(self) -> ItemRanker:
        run = self.run
        return ItemRanker(run.reading)

    @functools.cached_property
    @override
    def encoder(self) -> Encoder:
        """Gives a request's columns their rows."""
        return Encoder(self.kind.request_schema(self.run.config.model, self.run.schema))

    @property
    @override
    def log_encoder(self) -> Encoder:
        return self.encoder if self.encoder.streams else Encoder(self.run.schema)

    @override
    def pack(self, encoded: EncodedColumns, batch_size: int) -> Batch:
        return self.packer.pack(self.packer.prepare(encoded.by_name()), batch_size)

    def users(self, batch: Batch) -> tuple[np.ndarray, int]:
        """(batch, dim) float32 vectors of users, and how many of them are of examples, the first ones.

        Raises:
          DivergedError: If a vector is NaN or infinite.
        """
        outputs: Any = self.run.run.predictions.of_batch(batch)
        users, count = np.asarray(jax.device_get(outputs["user"])), int(batch.mask.sum())
        check_finite(users[:count])
        return users, count

    def users_of(self, encoded: EncodedColumns, batch_size: int) -> np.ndarray:
        """(examples, dim) float32 vectors of users, ``batch_size`` predicted at a time; errors as of ``users``."""
        parts = [np.zeros((0, self._ranker.dim), np.float32)]
        for begin in range(0, encoded.examples, batch_size):
            piece = encoded.cut(begin, min(begin + batch_size, encoded.examples))
            users, count = self.users(self.pack(piece, batch_size))
            parts.append(users[:count])
        return np.concatenate(parts)

    def item_vectors(self, rows: np.ndarray) -> np.ndarray:
        """(…, dim) float32 vectors of ranked items, any of row -1; a score is their product with a user's."""
        return self._ranker.vectors(rows)

    @override
    def explainer(self, k: int) -> BestExplainer:
        return BestExplainer(self, k)

    @override
    def of_batch(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        users, count = self.users(batch)
        scores, rows = self._ranker.best(users, np.asarray(batch.extras[SEEN]), self._k)
        return scores[:count], rows[:count]

    def candidates(self, columns: object, examples: int, unknown: UnknownValues) -> ListColumn:
        """By example the rows of the items that columns name.

        Raises:
          DatasetError: If they name none, or what is no list of values.
        """
        table = self.kind.item_table(self.run.config.model, self.run.schema).name
        if (named := self.encoder.named_rows(columns, CANDIDATES, table, unknown=unknown)) is None:
            raise NoCandidatesError(self.encoder.raw_columns)
        return checked(named, examples)

    def candidate_scores(
        self, encoded: EncodedColumns, candidates: ListColumn, batch_size: int
    ) -> list[list[float | None]]:
        """A cosine for each candidate of each example; None of an item that is not ranked.

        Raises:
          DivergedError: If a user's vector is NaN or infinite.
        """
        return self._ranker.candidate_scores(self.users_of(encoded, batch_size), candidates)

    @override
    def of_candidates(self, paths: Sequence[str], batch_size: int, unknown: UnknownValues) -> Iterator[Piece] | None:
        types = types_with_candidates(paths, self.encoder)
        return candidate_pieces(self, paths, types, batch_size, unknown) if types else None

    @override
    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((0, self._k), np.float32), np.zeros((0, self._k), np.int32)

    @override
    def piece(
        self,
        outputs: tuple[np.ndarray, np.ndarray],
        *,
        split: str = "",
        first: int = 0,
        labels: ByTask | None = None,
        weights: np.ndarray | None = None,
    ) -> Best:
        scores, rows = outputs
        return Best(split=split, first=first, scores=scores, rows=rows, values=self.values)

    @functools.cached_property
    def values(self) -> pa.Array | None:
        """The values of the items' table by row; None where it has no vocabulary."""
        config, schema = self.run.config, self.run.schema
        return table_values(pathlib.Path(config.data.path), schema, self.kind.item_table(config.model, schema))
