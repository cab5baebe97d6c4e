"""Batches of a run with a plan, cut into the devices' parts, where no row lies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrec.run.batches import Batches
from jrec.run.feed import LoaderFeed, Ready
from jrec.run.mesh_arrays import Shapes, agreed, described, on_mesh, stacked
from jrec.run.mesh_setup import FIRST_BATCHES, MeshSetup


class MeshFeed(LoaderFeed):
    """A loader's batches on a mesh; see ``Feed``.

    Several processes agree on the static sizes of every batch, from host to host, while the step before is taken.

    Args:
      loader: The training batches, cut by ``setup.parts``.
      setup: Mesh and plan.
      total: Steps of the run; None where only its batches tell.
      on_growth: Called in process 0 with the number of the step and what grew, when sizes grow.
      shapes: Static sizes of the batches; None settles them by the run's next batches.
    """

    def __init__(
        self,
        loader: Batches,
        *,
        setup: MeshSetup,
        total: int | None,
        on_growth: Callable[[int, Mapping[str, Any]], None] = lambda step, grown: None,
        shapes: Shapes | None = None,
    ):
        super().__init__(loader)
        self._setup, self._total, self._on_growth = setup, total, on_growth
        self._shapes = shapes
        self._step = 0

    def next(self) -> Ready:
        """The next batch, ready for its step; see ``Feed``."""
        setup = self._setup
        if self._shapes is None:
            self._shapes = self._settled()
        self._step += 1
        dealt: Any = next(self._loader)
        grown = self._shapes.fit(dealt, setup.local, setup.peers)
        if grown and jax.process_index() == 0:
            self._on_growth(self._step, described(grown))
        prepared = on_mesh(stacked(dealt.parts, setup.local, self._shapes), setup.mesh)
        return Ready(batch=dealt.batch, prepared=prepared, grown=self._loader.aside)

    def sections(self, seconds: float) -> dict[str, Any]:
        """The feed's sections of the report; see ``Feed``."""
        del seconds
        return self._setup.decided_forms(self._loader)

    def _settled(self) -> Shapes:
        """Sizes to begin with, from the run's next batches; all processes agree."""
        setup, loader = self._setup, self._loader
        setup.decide_forms(loader)
        most = FIRST_BATCHES if self._total is None else min(FIRST_BATCHES, self._total - loader.position)
        batches: Any = loader.upcoming(most)
        shapes = setup.shapes(len(batches[0].batch.labels) * jax.process_count())
        shapes.settle(agreed(shapes.most(batches, setup.local), setup.peers))
        return shapes
