"""Ranks all items of a run's table for users: where the next item comes, and the best ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrec.batch import Batch
from jrec.data.next_items import SEEN, TARGET
from jrec.data.schema import Schema
from jrec.mesh.route import AXIS
from jrec.nn.ranking import BLOCK, ranks, top_k
from jrec.run.run import Run
from jrec.train.config import TrainConfig
from jrec.train.report.metrics import check_finite
from jrec.train.report.ranking import LEFT_OUT, NEVER, RankScores

_SCORES = 1 << 24  # that are held at once
_LEAST = 256


class ItemRanker:
    """All items of a run as its last step left them, to be ranked for users; each process ranks for its own.

    Args:
      run: The run.
      config: Its configuration.
      schema: The features that its model reads.
    """

    def __init__(self, run: Run, config: TrainConfig, schema: Schema):
        (table,) = schema.tables
        rows = np.asarray(run.table(table.name), np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        self._rows = jnp.asarray(rows / np.maximum(lengths, np.float32(1e-6)))
        self._oov_row, self._leaves_out = table.oov_row, config.evaluate.leave_out_history
        self.candidates, self._at = table.rows - (table.oov_row is not None), config.evaluate.at
        devices = jax.local_devices()[:1] if run.mesh is None else run.mesh.local_devices
        self._mesh = Mesh(np.array(devices), (AXIS,))

    def ranks(self, users: np.ndarray, targets: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """How many items score at least as high as each user's; ``NEVER`` of one without a row of its own.

        ``LEFT_OUT`` of one that is in the history, where the history is left out.

        Args:
          users: (n, dim) float32.
          targets: (n,) rows.
          seen: (n, length) rows of the histories, -1 for none.
        """
        known = (targets >= 0) & (targets != (-1 if self._oov_row is None else self._oov_row))
        of_known = np.where(known, targets, 0 if self._oov_row != 0 else 1)
        found = ranks(users, self._rows, of_known, **self._among(users, seen))
        repeated = (seen == targets[:, None]).any(axis=1) if self._leaves_out else np.zeros(len(targets), bool)
        return np.where(known, np.where(repeated, LEFT_OUT, found), NEVER).astype(np.int32)

    def best(self, users: np.ndarray, seen: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores, (n, k) float32, and rows, (n, k) int32, of the best items; -inf and -1 where there are fewer."""
        return top_k(users, self._rows, k, **self._among(users, seen))

    def scores(
        self, predictions: Iterable[tuple[Mapping[str, Any], Batch]], on_batch: Callable[[], None] = lambda: None
    ) -> RankScores:
        """The ranks of all examples of this process.

        Args:
          predictions: Pairs of outputs and the process's own batch, whose extras have the items and the histories.
          on_batch: Called after each batch.

        Raises:
          DivergedError: If a vector is NaN or infinite.
        """
        found = [np.empty(0, np.int32)]
        for outputs, batch in predictions:
            keep, users = np.asarray(batch.mask) != 0, own_lines(outputs["user"], batch)
            own = self.ranks(users, np.asarray(batch.extras[TARGET]), np.asarray(batch.extras[SEEN]))
            found.append(own[keep])
            on_batch()
        return RankScores(ranks=np.concatenate(found), candidates=self.candidates, at=self._at)

    def _among(self, users: np.ndarray, seen: np.ndarray) -> dict[str, Any]:
        seen = seen if self._leaves_out else seen[:, :0]
        if self._oov_row is not None:
            seen = np.concatenate([seen, np.full((len(seen), 1), self._oov_row, seen.dtype)], axis=1)
        block = min(BLOCK, max(_LEAST, _SCORES // max(1, len(users))))
        return {"seen": seen.astype(np.int32), "block": block, "mesh": self._mesh}


def own_lines(outputs: Any, batch: Batch) -> np.ndarray:
    """Of the outputs of all processes those of this one's batch.

    Raises:
      DivergedError: If one of an example is NaN or infinite.
    """
    lines, examples = np.asarray(outputs), len(batch.labels)
    begin = 0 if len(lines) == examples else jax.process_index() * examples
    own = lines[begin : begin + examples]
    check_finite(own[np.asarray(batch.mask) != 0])
    return own
