"""Predictions on a mesh: every process reads, cuts and routes its own examples alone.

The static sizes of a batch must be those of all processes. They agree on some batches at a time, ahead of their turn:
one small exchange between hosts, then all of these are predicted. Sizes grow with the batches, and nothing is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.train.mesh_arrays import MeshBatch, Shapes, Sizes, from_table, on_mesh, stacked, table_of
from jrec.train.mesh_batch import Dealt, Parts
from jrec.train.mesh_plan import computing_of
from jrec.train.mesh_step import State

if TYPE_CHECKING:
    from jrec.train.mesh_run import MeshSetup

_AGREED_AT_ONCE = 8
"""Batches whose sizes the processes of a run settle together."""


class MeshPredictions:
    """Predicts on batches of which every process gives its own part.

    Args:
      setup: mesh and plan.
      predict: ``state, batch -> logits`` of a batch that is on the mesh.
    """

    def __init__(self, setup: MeshSetup, predict: Callable[[State, MeshBatch], jax.Array]):
        self._setup, self._predict = setup, predict
        self._shapes: dict[int, Shapes] = {}

    @property
    def shares(self) -> bool:
        """Whether all processes have as many devices that compute, so that they can share every batch equally."""
        processes = [d.process_index for d in self._setup.mesh.devices.flat]
        return len(set(computing_of(self._setup.plan, processes))) == 1

    @property
    def multiple(self) -> int:
        """A batch of all processes is a multiple of this."""
        return len(self._setup.plan.askers)

    @property
    def transform(self) -> Parts:
        """What a loader makes of its batches for ``of_split``."""
        return self._setup.parts

    def of_split(self, state: State, loader: Loader) -> Iterator[tuple[jax.Array, Batch]]:
        """Logits of all processes' examples, those of the first process first, and its own batch, batch by batch.

        Args:
          state: of the model.
          loader: of the process's own examples, cut by ``transform``; of as many batches in every process.
        """
        if not self._setup.forms.decided:  # nothing was trained
            first: Any = loader.batch(0)
            self._setup.forms.decide([first.parts], self._setup.local, training=False)
        batches: Any = loader
        for some in itertools.batched(batches, _AGREED_AT_ONCE if jax.process_count() > 1 else 1):
            shapes = self._fitting(some)
            for dealt in some:
                yield self._predict(state, self._on_mesh(dealt, shapes)), dealt.batch

    def _fitting(self, some: Sequence[Dealt]) -> Shapes:
        """Sizes for these batches of all processes."""
        setup, examples = self._setup, len(some[0].batch.labels) * jax.process_count()
        if examples not in self._shapes:
            self._shapes[examples] = setup.shapes(examples)
        shapes = self._shapes[examples]
        shapes.grow(agreed(shapes.most([dealt.parts for dealt in some], setup.local)))
        return shapes

    def _on_mesh(self, dealt: Dealt, shapes: Shapes) -> MeshBatch:
        return on_mesh(stacked(dealt.parts, self._setup.local, shapes), self._setup.mesh)


def agreed(needed: dict[str, Sizes]) -> dict[str, Sizes]:
    """The greatest needs of all processes."""
    if jax.process_count() == 1 or not needed:
        return needed
    from jax.experimental import multihost_utils

    most = np.asarray(multihost_utils.process_allgather(table_of(needed, needed))).max(axis=0)
    return from_table(needed, most)
