"""Which features a score depends on most: what the score would be if one feature said nothing, each in turn.

One feature is left out, and all others stay. That is no Shapley value: the changes do not add up to the score, and two
features that say the same may both change nothing, since each is there while the other is left out.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, override

import numpy as np

from jrec.data.columns import Column, ListColumn
from jrec.data.encoded_columns import EncodedColumns
from jrec.errors import ConfigError
from jrec.serving.model import predictions

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.app.models.predictor import Piece, Predictor
    from jrec.app.models.scored import ClickPredictor, Scored
    from jrec.serving.answers import ByTask

Pairs = list[list[tuple[str, float]]]
"""By example the names of what its score depends on, each with its change, the greatest first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reasons:
    """The features that change the scores of some examples most, the most first.

    Attributes:
      names: What is left out: features by name, or items of a history.
      features: (examples, k) int64, places in ``names``; -1 where an example has fewer. Of ranked items (examples,
        items, k).
      changes: Of the same shape, float32: the score less what it is without the feature, above 0 where that raises it.
    """

    names: tuple[str, ...]
    features: np.ndarray
    changes: np.ndarray

    def pairs(self) -> Pairs:
        """By example (name, change) of its features."""
        return [
            [(self.names[feature], change) for feature, change in zip(features, changes, strict=True) if feature >= 0]
            for features, changes in zip(self.features.tolist(), self.changes.tolist(), strict=True)
        ]

    def at(self, which: np.ndarray | tuple[slice, int]) -> Reasons:
        """The reasons at an index of ``features``."""
        return dataclasses.replace(self, features=self.features[which], changes=self.changes[which])

    def columns(self, suffix: str = "") -> dict[str, pa.Array]:
        """The columns why_1, why_1_change, why_2, …, each name with ``suffix`` behind it."""
        import pyarrow as pa

        names, columns = pa.array(self.names, pa.string()), {}
        for place in range(self.features.shape[1]):
            features, changes = self.features[:, place], self.changes[:, place]
            columns[f"why_{place + 1}{suffix}"] = names.take(pa.array(features, mask=features < 0))
            columns[f"why_{place + 1}_change{suffix}"] = pa.array(changes, mask=features < 0)
        return columns


class Explainer(abc.ABC):
    """Leaves out one feature of examples after another.

    A feature that is left out is as in a request that does not have it: a number the mean of training or what the
    schema's ``missing`` says, a value the missing one or, where training had none, an unknown one, a list empty.

    Args:
      predictor: Scores the examples.
      names: The features to leave out.
      k: How many features of each example are told.
      least: Whether there have to be that many.

    Raises:
      ConfigError: If there are fewer, or lists with weights that may not be empty.
    """

    def __init__(self, predictor: Predictor[Any], names: Sequence[str], k: int, *, least: bool = True):
        self.k, self.names, schema = k, tuple(names), predictor.run.schema
        self._encoder = predictor.encoder
        read = [feature for feature in schema.categorical if feature.name in self.names]
        if whole := [feature.name for feature in read if feature.fixed_length and feature.weighted]:
            raise ConfigError(
                f"feature {whole[0]!r} has a weight for every value of lists of one length (fixed_length), none of"
                " which may be missing, so that no score can be told without it; prepare it without fixed_length"
            )
        if k < 1 or (least and k > len(self.names)):
            raise ConfigError(
                f"the {k} features that a score depends on most are asked for, but predictions read"
                f" {len(self.names)}: {', '.join(self.names)}"
            )

    @functools.cached_property
    def blank(self) -> EncodedColumns:
        """One example that says nothing."""
        return self._encoder.blank()

    @abc.abstractmethod
    def of_columns(self, columns: object, batch_size: int) -> Pairs | dict[str, Pairs]:
        """The reasons for the scores of raw columns, as ``LoadedRun.why`` returns them."""

    @abc.abstractmethod
    def explained(self, piece: Piece, encoded: EncodedColumns | None, batch_size: int) -> Piece:
        """The predictor's scores of examples with their reasons; ``encoded`` None of a piece without examples."""


class ScoreExplainer(Explainer):
    """Tells on which features the score of an example depends.

    Args:
      predictor: Scores the examples.
      k: How many features of each example are told.

    Raises:
      ConfigError: If predictions read fewer than ``k`` features, or lists with weights that may not be empty.
    """

    def __init__(self, predictor: ClickPredictor, k: int):
        super().__init__(predictor, predictor.kind.inputs(predictor.run.config.model, predictor.run.schema), k)
        self._predictor = predictor

    def reasons(self, encoded: EncodedColumns, logits: ByTask, batch_size: int) -> Reasons | Mapping[str, Reasons]:
        """The reasons for the scores of examples, by task where there are several labels.

        Args:
          encoded: The examples.
          logits: What the predictor says of them.
          batch_size: Examples that are predicted at once.

        Raises:
          DivergedError: If a logit is NaN or infinite.
        """
        without: list[Any] = [
            self._predictor.logits(self._predictor.of_encoded(left_out(encoded, self.blank, name), batch_size))
            for name in self.names
        ]
        if isinstance(logits, Mapping):
            return {task: self._most(logits[task], [by_task[task] for by_task in without], task) for task in logits}
        return self._most(logits, without)

    @override
    def of_columns(self, columns: object, batch_size: int) -> Pairs | dict[str, Pairs]:
        encoded = self._predictor.encoder.columns(columns)
        logits = self._predictor.logits(self._predictor.of_encoded(encoded, batch_size))
        reasons = self.reasons(encoded, logits, batch_size)
        if isinstance(reasons, Mapping):
            return {task: of_task.pairs() for task, of_task in reasons.items()}
        return reasons.pairs()

    @override
    def explained(self, piece: Piece, encoded: EncodedColumns | None, batch_size: int) -> Scored:
        piece = cast("Scored", piece)
        if encoded is not None:
            return dataclasses.replace(piece, reasons=self.reasons(encoded, piece.logits, batch_size))
        nothing = np.zeros((0, self.k))
        none = Reasons(names=self.names, features=nothing.astype(np.int64), changes=nothing.astype(np.float32))
        tasks = self._predictor.tasks
        return dataclasses.replace(piece, reasons=dict.fromkeys(tasks, none) if tasks else none)

    def _most(self, logits: np.ndarray, without: list[np.ndarray], task: str = "") -> Reasons:
        scores, *less = (predictions(outputs, self._predictor.numbers, task) for outputs in (logits, *without))
        changes = scores[:, None] - np.stack(less, axis=1)
        # Stable: features that change a score as much come in their own order.
        order = np.argsort(-np.abs(changes), axis=1, kind="stable")[:, : self.k]
        return Reasons(names=self.names, features=order, changes=np.take_along_axis(changes, order, axis=1))


def left_out(encoded: EncodedColumns, blank: EncodedColumns, name: str) -> EncodedColumns:
    """The examples with the only value that ``blank`` has of a feature."""
    if name in encoded.dense_names:
        dense, place = encoded.dense.copy(), encoded.dense_names.index(name)
        dense[:, place] = blank.dense[0, blank.dense_names.index(name)]
        return dataclasses.replace(encoded, dense=dense)
    weights = dict(encoded.weights)
    if name in weights:
        weights[name] = np.tile(blank.weights[name], encoded.examples)
    return dataclasses.replace(
        encoded, ids={**encoded.ids, name: _repeated(blank.ids[name], encoded.examples)}, weights=weights
    )


def _repeated(column: Column, examples: int) -> Column:
    """A column's only example, ``count`` times."""
    if not isinstance(column, ListColumn):
        return np.repeat(column, examples)
    return ListColumn(np.arange(examples + 1, dtype=np.int64) * len(column.values), np.tile(column.values, examples))
