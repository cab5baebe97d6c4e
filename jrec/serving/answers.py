"""What a model answers requests with: scores, the best items, or scores of the items that a request names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np

from jrec.json_values import JsonObject
from jrec.serving.format import Manifest

if TYPE_CHECKING:
    import pyarrow as pa

_LINES, _LINE = 10, 200  # of an answer that is printed, and characters of one

ByTask = np.ndarray | Mapping[str, np.ndarray]
"""Numbers of examples, (n,) float32; by task where a model has several labels."""
Item = str | int
"""An item's value as text, or its row where its table has no vocabulary."""


class Answer(Protocol):
    """An entry for each row of a request, or of several that were scored together."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the export, or of the last delta, that computed all of them."""
        ...

    def of_rows(self, rows: slice, k: int) -> Self:
        """The same of some rows, and of ranked items only the ``k`` best."""
        ...

    def finite(self) -> np.ndarray:
        """(rows,) bool: whether all numbers of a row are finite."""
        ...

    def columns(self) -> JsonObject:
        """What JSON has, by name: a list with an entry for each row, or a dictionary of such lists by task."""
        ...

    def predictions(self) -> Sequence[object]:
        """One prediction for each row, for clients that send "instances"."""
        ...

    def arrays(self) -> dict[str, pa.Array]:
        """What Arrow has: columns by name."""
        ...


class Scored(NamedTuple):
    """Probabilities, and what computed all of them.

    Attributes:
      scores: (examples,) float32, or a dictionary of them by task.
      manifest: The manifest of the export, or of the last delta.
    """

    scores: ByTask
    manifest: Manifest

    def of_rows(self, rows: slice, k: int) -> Scored:
        """The same of some rows."""
        del k
        scores = self.scores
        return self._replace(
            scores={task: own[rows] for task, own in scores.items()} if isinstance(scores, Mapping) else scores[rows]
        )

    def finite(self) -> np.ndarray:
        """(rows,) bool: whether all scores of a row are finite."""
        scores = self.scores.values() if isinstance(self.scores, Mapping) else [self.scores]
        return np.logical_and.reduce([np.isfinite(own) for own in scores])

    def columns(self) -> JsonObject:
        """``scores``, or ``predictions`` of what is a number; of several tasks by task."""
        numbers = self.manifest.numbers_by_label
        if not isinstance(self.scores, Mapping):
            return {f"{_kind('', numbers)}s": self.scores.tolist()}
        columns: dict[str, dict[str, list[float]]] = {}
        for task, own in self.scores.items():
            columns.setdefault(f"{_kind(task, numbers)}s", {})[task] = own.tolist()
        return columns

    def predictions(self) -> list[float] | list[dict[str, float]]:
        """A score, or an object of them by task."""
        if not isinstance(self.scores, Mapping):
            return self.scores.tolist()
        lists = (own.tolist() for own in self.scores.values())
        return [dict(zip(self.scores, row, strict=True)) for row in zip(*lists, strict=True)]

    def arrays(self) -> dict[str, pa.Array]:
        """A float32 column for each task; see ``column_name``."""
        import pyarrow as pa

        by_task = self.scores if isinstance(self.scores, Mapping) else {"": self.scores}
        numbers = self.manifest.numbers_by_label
        return {column_name(task, numbers): pa.array(own, pa.float32()) for task, own in by_task.items()}


def column_name(task: str, numbers: Collection[str]) -> str:
    """``score``, or ``prediction`` where the task is among ``numbers``; of several tasks ``score_TASK``."""
    return f"{_kind(task, numbers)}_{task}" if task else _kind(task, numbers)


def _kind(task: str, numbers: Collection[str]) -> str:
    return "prediction" if task in numbers else "score"


class Best(NamedTuple):
    """The best items of some users, and what computed all of them.

    Attributes:
      scores: By example, cosines as floats, the best first.
      items: By example, the items' values; rows of a table without a vocabulary.
      manifest: The manifest of the export, or of the last delta.
    """

    scores: list[list[float]]
    items: list[list[Item]]
    manifest: Manifest

    def __repr__(self) -> str:
        pairs = (zip(items, scores, strict=True) for items, scores in zip(self.items, self.scores, strict=True))
        return _printed(self, [", ".join(f"{item} {score:.4f}" for item, score in line) for line in pairs])

    def of_rows(self, rows: slice, k: int) -> Best:
        """The ``k`` best items of some rows."""
        scores, items = self.scores[rows], self.items[rows]
        return Best([line[:k] for line in scores], [line[:k] for line in items], self.manifest)

    def finite(self) -> np.ndarray:
        """(rows,) bool: whether all scores of a row are finite."""
        return _all_finite(self.scores)

    def columns(self) -> JsonObject:
        """``items`` and ``scores``."""
        return {"items": self.items, "scores": self.scores}

    def predictions(self) -> list[JsonObject]:
        """An object of ``items`` and ``scores``."""
        pairs = zip(self.items, self.scores, strict=True)
        return [{"items": items, "scores": scores} for items, scores in pairs]

    def arrays(self) -> dict[str, pa.Array]:
        """Lists ``item`` and ``score``."""
        import pyarrow as pa

        numbers = any(isinstance(item, int) for line in self.items for item in line)
        items = pa.array(self.items, pa.list_(pa.int64() if numbers else pa.string()))
        return {"item": items, "score": pa.array(self.scores, pa.list_(pa.float32()))}


class CandidateScores(NamedTuple):
    """Scores of the candidates of some users, and what computed all of them.

    Attributes:
      scores: By example, a cosine for each of its candidates, in their order; None of an item that the model does not
        rank, as one that training did not see.
      manifest: The manifest of the export, or of the last delta.
    """

    scores: list[list[float | None]]
    manifest: Manifest

    def __repr__(self) -> str:
        return _printed(
            self, [", ".join("None" if one is None else f"{one:.4f}" for one in line) for line in self.scores]
        )

    def of_rows(self, rows: slice, k: int) -> CandidateScores:
        """The same of some rows."""
        del k
        return self._replace(scores=self.scores[rows])

    def finite(self) -> np.ndarray:
        """(rows,) bool: whether all scores of a row are finite."""
        return _all_finite([[score for score in line if score is not None] for line in self.scores])

    def columns(self) -> JsonObject:
        """``scores``."""
        return {"scores": self.scores}

    def predictions(self) -> list[list[float | None]]:
        """The candidates' scores."""
        return self.scores

    def arrays(self) -> dict[str, pa.Array]:
        """Lists ``score``."""
        import pyarrow as pa

        return {"score": pa.array(self.scores, pa.list_(pa.float32()))}


def _printed(answer: Best | CandidateScores, lines: Sequence[str]) -> str:
    """An answer as people print it, a line for each of the first examples."""
    cut = [line if len(line) <= _LINE else f"{line[:_LINE]}…" for line in lines[:_LINES]]
    more = [f"and {len(lines) - _LINES:,} more"] * (len(lines) > _LINES)
    head = f"{type(answer).__name__} of {len(lines):,} examples by {answer.manifest!r}"
    return "\n".join([head, *(f"  {line}" for line in [*cut, *more])])


def _all_finite(lines: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([np.isfinite(line).all() for line in lines], bool)
