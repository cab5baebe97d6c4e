"""Ranks all items of a run's table for users: where the next item comes, and the best ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrec.app.models.next_items import SEEN, TARGET
from jrec.app.models.ranking import ranking_kind
from jrec.app.models.reading import Reading
from jrec.app.report.ranking import LEFT_OUT, NEVER, RankScores
from jrec.batch import Batch
from jrec.data.columns import ListColumn
from jrec.mesh.route import AXIS
from jrec.metrics import check_finite
from jrec.nn.ranking import BLOCK, ranks, top_k
from jrec.serving.candidates import scores_of
from jrec.serving.nearest import of_unit_length

_SCORES = 1 << 24  # that are held at once
_LEAST = 256


class _Among(TypedDict):
    """Keyword arguments of ``ranks`` and ``top_k``."""

    left_out: np.ndarray
    block: int
    mesh: Mesh


class ItemRanker:
    """All items of a run as its last step left them, to be ranked for users; each process ranks for its own.

    Args:
      reading: The run. Without a catalogue the items are all rows of their table but the one for unknown values, as
        they are.
    """

    def __init__(self, reading: Reading):
        run, config, schema = reading.run, reading.config, reading.schema
        table = ranking_kind(config.model).item_table(config.model, schema)
        if reading.catalogue is None:
            self._rows = np.delete(np.arange(table.rows), [] if table.oov_row is None else table.oov_row)
            # Scores are cosines, as ``item_vectors`` has them.
            vectors = of_unit_length(np.asarray(run.table(table.name), np.float32)[self._rows])
        else:
            self._rows, vectors = reading.catalogue.rows, item_vectors(reading)
        self._vectors = jnp.asarray(vectors)
        self.candidates, self.dim = vectors.shape
        # Absent items are -1, which indexes the last element: it stays without a place, too.
        self._place = np.full(table.rows + 1, -1, np.int32)
        self._place[self._rows] = np.arange(len(vectors))
        self._at, self._labels = config.evaluate.at, schema.labels
        self._leaves_out = config.evaluate.leave_out_history
        # Every process has all items and ranks for its own users, so that no collective is needed.
        devices = jax.local_devices()[:1] if run.mesh is None else run.mesh.local_devices
        self._mesh = Mesh(np.array(devices), (AXIS,))

    def ranks(self, users: np.ndarray, targets: np.ndarray, histories: np.ndarray) -> np.ndarray:
        """How many items score at least as high as each user's; ``NEVER`` of one that is none of them.

        ``LEFT_OUT`` of one that is in the history, where the history is left out.

        Args:
          users: (n, dim) float32.
          targets: (n,) rows.
          histories: (n, length) rows of the items that each user had, -1 for none.
        """
        places = self._place[targets]
        known = places >= 0
        # A target without a place stands at the first item's until its rank is replaced below.
        above = ranks(users, self._vectors, np.maximum(places, 0), **self._among(users, histories))
        repeated = (histories == targets[:, None]).any(axis=1) if self._leaves_out else np.zeros(len(targets), bool)
        return np.where(known, np.where(repeated, LEFT_OUT, above), NEVER).astype(np.int32)

    def best(self, users: np.ndarray, histories: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores, (n, k) float32, and rows, (n, k) int32, of the best items; -inf and -1 where there are fewer."""
        scores, places = top_k(users, self._vectors, k, **self._among(users, histories))
        return scores, np.where(places >= 0, self._rows[places], -1).astype(np.int32)

    def candidate_scores(self, users: np.ndarray, candidates: ListColumn) -> list[list[float | None]]:
        """Cosines of users with the candidates that each names; None of an item that is none of them.

        Args:
          users: (n, dim) float32.
          candidates: By user the rows of items in their table.
        """
        vectors = np.asarray(self._vectors)
        places = ListColumn(candidates.offsets, self._place[candidates.values])
        return scores_of(lambda numbers: vectors[numbers], users, places)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """(…, dim) float32 vectors of items by row; of -1, any."""
        return np.asarray(self._vectors[self._place[rows]])

    def scores(
        self, predictions: Iterable[tuple[Mapping[str, jax.Array], Batch]], on_batch: Callable[[], None] = lambda: None
    ) -> RankScores:
        """The ranks of all examples of this process, of a dataset with labels of those with label 1.

        Args:
          predictions: Pairs of outputs and the process's own batch, whose extras have the items and the histories.
          on_batch: Called after each batch.

        Raises:
          DivergedError: If a vector is NaN or infinite.
        """
        collected = [np.empty(0, np.int32)]
        for outputs, batch in predictions:
            keep, users = np.asarray(batch.mask) != 0, own_lines(outputs["user"], batch)
            if self._labels:
                keep &= np.asarray(batch.labels) > 0
            own = self.ranks(users, np.asarray(batch.extras[TARGET]), np.asarray(batch.extras[SEEN]))
            collected.append(own[keep])
            on_batch()
        return RankScores(ranks=np.concatenate(collected), candidates=self.candidates, at=self._at)

    def _among(self, users: np.ndarray, histories: np.ndarray) -> _Among:
        histories = self._place[histories] if self._leaves_out else histories[:, :0]
        # (users, block) scores are held at once: more users, fewer items at a time.
        block = min(BLOCK, max(_LEAST, _SCORES // max(1, len(users))))
        return {"left_out": histories.astype(np.int32), "block": block, "mesh": self._mesh}


def item_vectors(reading: Reading) -> np.ndarray:
    """(items, dim) float32 of length one: what the item tower makes of a catalogue, in every process.

    Args:
      reading: The run, whose rows in host memory are flushed, and the items.

    Raises:
      DivergedError: If a vector is NaN or infinite.
    """
    run, config, catalogue = reading.run, reading.config, reading.catalogue
    assert catalogue is not None  # the caller has items whose vectors a tower makes
    packer = ranking_kind(config.model).packer(config, reading.schema, run.layout, training=False)
    size = config.data.eval_batch_size
    blocks = []
    for begin in range(0, len(catalogue.rows), size):
        columns = packer.prepare(catalogue.cut(begin, begin + size))
        outputs: Any = run.predictions.of_batch(packer.pack(columns, size))
        # The last batch is padded.
        blocks.append(np.asarray(jax.device_get(outputs["item"]))[: columns.examples])
    vectors = np.concatenate(blocks)
    check_finite(vectors)
    return vectors


def own_lines(outputs: jax.Array, batch: Batch) -> np.ndarray:
    """The lines of this process's batch, among the outputs of all processes.

    Raises:
      DivergedError: If one of an example is NaN or infinite.
    """
    lines, examples = np.asarray(outputs), len(batch.labels)
    # Outputs of several processes follow each other in their order, as many lines of each.
    begin = 0 if len(lines) == examples else jax.process_index() * examples
    own = lines[begin : begin + examples]
    check_finite(own[np.asarray(batch.mask) != 0])
    return own
