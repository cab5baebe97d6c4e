"""Scores of the items that a request names, in place of the best of all: what a reranker asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import numpy as np

from jrec.data.columns import ListColumn
from jrec.data.schema import DatasetError
from jrec.serving.nearest import of_unit_length

CANDIDATES = "candidates"
"""The column of a request with the items to score: lists of values as the log has them."""


class NoCandidatesError(DatasetError):
    """Scores of candidates are asked for, but columns name none."""

    def __init__(self, raw_columns: Collection[str]):
        reason = "is a feature's" if CANDIDATES in raw_columns else "is missing"
        super().__init__(f"column {CANDIDATES!r} {reason}, so that no candidates are named; ask for the best items")


_BLOCK = 65_536  # candidates whose vectors are held at once


def checked(candidates: ListColumn, examples: int) -> ListColumn:
    """The candidates, of which there is a list for each example.

    Raises:
      ValueError: If there are more or fewer.
    """
    if (lists := len(candidates.offsets) - 1) != examples:
        raise ValueError(f"column {CANDIDATES!r} has {lists:,} lists, but other columns have {examples:,} rows")
    return candidates


def scores_of(
    vectors_of: Callable[[np.ndarray], np.ndarray], users: np.ndarray, candidates: ListColumn
) -> list[list[float | None]]:
    """The product of each user's vector with each of its candidates' vectors.

    Args:
      vectors_of: (n, dim) float32 vectors, of length one for cosines, of (n,) places.
      users: (examples, dim) float32, finite.
      candidates: By example the places of items; -1 of an unknown one, which has no score.
    """
    offsets, places = np.asarray(candidates.offsets), candidates.values
    of_user = np.repeat(np.arange(len(users)), np.diff(offsets))
    scores = np.empty(len(places), np.float32)
    for begin in range(0, len(places), _BLOCK):
        some = slice(begin, begin + _BLOCK)
        # An unknown item stands at the first one's place here; its score is taken out below.
        known = np.maximum(places[some], 0)
        scores[some] = np.einsum("ij,ij->i", vectors_of(known), users[of_user[some]])
    listed = [score if known else None for score, known in zip(scores.tolist(), (places >= 0).tolist(), strict=True)]
    return [listed[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]


def unit_rows(rows_of: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """The same rows, scaled to length one."""
    return lambda numbers: of_unit_length(rows_of(numbers.astype(np.int32)))
