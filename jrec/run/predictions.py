"""Predictions on batches of a split, wherever the rows live: on one device, over a mesh, in host memory.

On a mesh every process reads, cuts and routes only its own examples. All processes need the same static
sizes. They agree on some batches at a time, ahead of their turn: one small exchange between hosts, then all of
these are predicted. Sizes grow with the batches, and nothing is dropped. Where processes have unlike numbers of devices
that compute, every process reads whole batches instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.data.regroup import blank, gathered
from jrec.host.pipeline_batch import WholeBatches
from jrec.run.host_feed import rows_on_mesh, unique_rows
from jrec.run.mesh_arrays import Shapes, on_mesh, stacked
from jrec.run.mesh_plan import computing_of
from jrec.run.mesh_setup import MeshSetup
from jrec.run.partitioned_batch import PartitionedBatch
from jrec.run.state import RunState
from jrec.run.step import HostRows, StepBatch

_AGREED_AT_ONCE = 8
"""Batches whose sizes the processes of a run agree on together."""
Predicted = tuple[jax.Array, Batch]
"""Logits of all processes' examples, those of the first process first, and the process's own batch."""


class Predictions:
    """Predicts as a run's state is at the moment. Rows in host memory must be flushed.

    Args:
      run: The run.
    """

    def __init__(self, run: RunState):
        self._run = run
        self._shapes: dict[int, Shapes] = {}
        host = {name: run.layout.stacks[name] for name in run.tables}
        self._whole = WholeBatches(host, lambda tree: tree)

    @property
    def loading(self) -> dict[str, Any]:
        """How ``eval_loader`` reads the batches."""
        setup, growing = self._run.setup, self._run.growing
        loading: dict[str, Any] = {"growing": growing.rows_of_keys()} if growing else {}
        if setup is not None and self._shares(setup):
            loading |= {"transform": setup.partitioner, "multiple": len(setup.plan.compute_devices), "shared": True}
        return loading

    def of_split(self, loader: Loader) -> Iterator[Predicted]:
        """Predicts every batch of a loader that reads as ``loading`` says; of as many batches in every process."""
        setup = self._run.setup
        if setup is None or not self._shares(setup):
            for batch in loader:
                yield self.of_batch(batch), batch
            return
        if not setup.modes.decided:  # nothing was trained
            first: Any = loader.batch(0)
            setup.modes.decide([first.parts], setup.local, training=False)
        batches: Any = loader
        for waiting in itertools.batched(batches, _AGREED_AT_ONCE if jax.process_count() > 1 else 1):
            some = [setup.partitioner.placed_by_all(partitioned, setup.peers) for partitioned in waiting]
            shapes = self._fitting(setup, some)
            for partitioned in some:
                yield self._of_parts(setup, partitioned, shapes), partitioned.batch

    def of_batch(self, batch: Batch) -> jax.Array:
        """Logits, (batch,) float32, of a whole batch of NumPy arrays, which every process gives."""
        setup = self._run.setup
        if setup is None:
            prepared = self._whole.prepare(batch)
            return self._predict(unique_rows(prepared.rows, self._run.tables), StepBatch(batch=prepared.batch))
        wanted, count = len(batch.labels), len(setup.plan.compute_devices)
        examples = -(-wanted // count) * count
        if examples > wanted:
            more = blank(setup.layout, batch, examples - wanted)
            batch = gathered(setup.layout, [(batch, 0, wanted), (more, 0, examples - wanted)])
        # Every process routes all parts, so that all agree on modes and sizes.
        setup.decide_forms_without(batch)
        partitioned = setup.whole_partitioner(batch)
        shapes = self._of(setup, examples)
        shapes.fit(partitioned, range(setup.plan.devices))
        local = PartitionedBatch(
            batch=batch, parts=tuple(partitioned.parts[number] for number in setup.local), host=partitioned.host
        )
        return jax.tree.map(lambda array: array[:wanted], self._of_parts(setup, local, shapes))

    def _shares(self, setup: MeshSetup) -> bool:
        """Whether all processes have as many devices that compute, so that they can share every batch equally."""
        processes = [d.process_index for d in setup.mesh.devices.flat]
        return len(set(computing_of(setup.plan, processes))) == 1

    def _of(self, setup: MeshSetup, examples: int) -> Shapes:
        if examples not in self._shapes:
            self._shapes[examples] = setup.shapes(examples)
        return self._shapes[examples]

    def _fitting(self, setup: MeshSetup, some: Sequence[PartitionedBatch]) -> Shapes:
        """Sizes for these batches of all processes."""
        shapes = self._of(setup, len(some[0].batch.labels) * jax.process_count())
        shapes.make_room(shapes.most(some, setup.local), setup.peers)
        return shapes

    def _of_parts(self, setup: MeshSetup, partitioned: PartitionedBatch, shapes: Shapes) -> jax.Array:
        prepared = on_mesh(stacked(partitioned.parts, setup.local, shapes), setup.mesh)
        rows = unique_rows(shapes.host_rows_read(partitioned), self._run.tables)
        return self._predict(rows_on_mesh(rows, setup.mesh), prepared)

    def _predict(self, host: HostRows, batch: StepBatch) -> jax.Array:
        return self._run.compiled.predict_on(self._run.state, self._run.rows, host, batch)
