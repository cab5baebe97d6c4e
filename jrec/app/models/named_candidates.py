"""Scores of the items that lines of a log name, in place of the best of all: what a reranker asks for, offline."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, override

import numpy as np

from jrec.app.models.predictor import Piece
from jrec.data.arrow_values import decoded_type, is_list
from jrec.data.schema import DatasetError
from jrec.data.unknown import UnknownValues
from jrec.prepare.encoder import Encoder
from jrec.prepare.readers.streams import is_stream
from jrec.prepare.readers.tables import column_types, is_table, read_batches
from jrec.serving.candidates import CANDIDATES

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.app.models.best import RankingPredictor


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidatePiece(Piece):
    """The scores of the candidates of some examples that follow each other.

    Attributes:
      split, first: As of ``Piece``.
      counts: (n,) int64, each example's candidates.
      items: The candidates as the log names them, one example's after another's.
      scores: float32 cosines of them, null of one that is not ranked.
    """

    split: str
    first: int
    counts: np.ndarray
    items: pa.Array
    scores: pa.Array

    @property
    @override
    def examples(self) -> int:
        return len(self.counts)

    @override
    def columns(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The columns item and score, a line for each candidate, in their order."""
        return np.repeat(np.arange(self.examples), self.counts), {"item": self.items, "score": self.scores}


def types_with_candidates(paths: Sequence[str], encoder: Encoder) -> dict[str, dict[str, pa.DataType]]:
    """The columns' types of the files that have lists of candidates, beside the features' columns."""
    if CANDIDATES in encoder.raw_columns:
        return {}
    types = {path: column_types(path) for path in paths if is_table(path) and not is_stream(path)}
    return {path: own for path, own in types.items() if CANDIDATES in own and is_list(own[CANDIDATES])}


def candidate_pieces(
    predictor: RankingPredictor,
    paths: Sequence[str],
    read: Mapping[str, Mapping[str, pa.DataType]],
    batch_size: int,
    unknown: UnknownValues,
) -> Iterator[CandidatePiece]:
    """The scores of the candidates in files, in the order of their lines; at least one piece.

    Args:
      predictor: Scores them.
      paths: The files.
      read: ``types_with_candidates`` of them, not empty.
      batch_size: How many examples are predicted at a time.
      unknown: Counts the values that training did not see.

    Raises:
      DatasetError: If a file has no candidates, or theirs are of another type; if a value is none that a log may have.
    """
    import pyarrow as pa

    if lacking := [path for path in paths if path not in read]:
        raise DatasetError(
            f"{lacking[0]} has no column {CANDIDATES!r} of lists, but {next(iter(read))} has; predict them one by one"
        )
    first, kinds = 0, [decoded_type(read[path][CANDIDATES].value_type) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise DatasetError(
                f"{path}: column {CANDIDATES!r} holds lists of {kind}, but in {paths[0]} of {kinds[0]}; write them"
                " alike"
            )
    for path in paths:
        wanted = [name for name in (*predictor.encoder.raw_columns, CANDIDATES) if name in read[path]]
        for batch in read_batches(path, wanted, batch_size):
            try:
                encoded = predictor.encoder.columns(batch, unknown=unknown)
                candidates = predictor.candidates(batch, encoded.examples, unknown)
            except (DatasetError, ValueError) as error:  # a ValueError is about a column's type
                raise DatasetError(f"{path}: {error}") from error
            scores = predictor.candidate_scores(encoded, candidates, batch_size)
            yield CandidatePiece(
                split="",
                first=first,
                counts=np.diff(candidates.offsets),
                # ``flatten`` passes over what may lie behind a null list, which has no candidates either.
                items=batch.column(CANDIDATES).flatten().cast(kinds[0]),
                scores=pa.array(itertools.chain.from_iterable(scores), pa.float32()),
            )
            first += encoded.examples
    if not first:
        nothing = pa.array([], kinds[0])
        counts = np.zeros(0, np.int64)
        yield CandidatePiece(split="", first=0, counts=counts, items=nothing, scores=pa.array([], pa.float32()))
