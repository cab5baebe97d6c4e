"""Predictions on batches of a split, wherever the rows live: on one device, over a mesh, in host memory.

On a mesh every process reads and cuts only its own examples. Where processes have unlike numbers of devices that
compute, every process reads whole batches instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.data.regroup import blank, gathered
from jrec.host.pipeline_batch import WholeBatches
from jrec.run.feeds.hand_packed import check_rows
from jrec.run.feeds.host import rows_on_mesh, unique_rows
from jrec.run.feeds.partitioned import MeshBatches
from jrec.run.feeds.partitioned_batch import PartitionedBatch
from jrec.run.placement.plan import computing_of
from jrec.run.placement.setup import MeshSetup
from jrec.run.state import RunState
from jrec.run.step import HostRows, StepBatch

Predicted = tuple[jax.Array, Batch]
"""Logits of all processes' examples, those of the first process first, and the process's own batch."""


class Predictions:
    """Predicts as a run's state is at the moment. Rows in host memory must be flushed.

    Args:
      run: The run.
    """

    def __init__(self, run: RunState):
        self._run = run
        self._on_mesh: dict[bool, MeshBatches] = {}  # by whether every process reads whole batches
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
            setup.decide_modes_by([first], training=False)
        batches: Any = loader
        for partitioned in batches:
            yield self._of_parts(setup, partitioned), partitioned.batch

    def of_batch(self, batch: Batch) -> jax.Array:
        """Logits, (batch,) float32, of a whole batch of NumPy arrays, which every process gives.

        Raises:
          ValueError: If ``jrec.data`` did not pack a batch, and an address is no row of its table; see ``check_rows``.
        """
        if not batch.packed:
            check_rows(self._run.layout, batch)
        setup = self._run.setup
        if setup is None:
            prepared = self._whole.prepare(batch)
            return self._predict(unique_rows(prepared.rows, self._run.tables), StepBatch(batch=prepared.batch))
        wanted, count = len(batch.labels), len(setup.plan.compute_devices)
        examples = -(-wanted // count) * count
        if examples > wanted:
            # Devices get equal parts, so the batch is filled up; what the blank examples give is cut off below.
            more = blank(setup.layout, batch, examples - wanted)
            batch = gathered(setup.layout, [(batch, 0, wanted), (more, 0, examples - wanted)])
        partitioned = setup.whole_partitioner(batch)
        setup.decide_modes_by([partitioned], training=False)
        return jax.tree.map(lambda array: array[:wanted], self._of_parts(setup, partitioned, whole=True))

    def _shares(self, setup: MeshSetup) -> bool:
        """Whether all processes have as many devices that compute, so that they can share every batch equally."""
        processes = [d.process_index for d in setup.mesh.devices.flat]
        return len(set(computing_of(setup.plan, processes))) == 1

    def _of_parts(self, setup: MeshSetup, partitioned: PartitionedBatch, *, whole: bool = False) -> jax.Array:
        if whole not in self._on_mesh:
            self._on_mesh[whole] = MeshBatches(setup, whole=whole, peers=setup.peers)
        batches, tables = self._on_mesh[whole], self._run.tables
        prepared = batches.prepare(partitioned)
        # Read here, not through the pipeline: rows in host memory are flushed, and predictions write none back.
        rows = rows_on_mesh(unique_rows(prepared.rows, tables), setup.mesh)
        return self._predict(rows, batches.send(prepared.sent))

    def _predict(self, host: HostRows, batch: StepBatch) -> jax.Array:
        return self._run.compiled.predict_on(self._run.state, self._run.rows, host, batch)
