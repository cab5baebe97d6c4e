"""The program of one dispatch: some training steps of a model, and the running AUC, of shapes alone.

It is what ``Run.compile`` makes of the same modules and dispatches (``tests/test_dispatched.py`` compares the two), for
devices that need not be there: its arguments are a ``FlatState``, the rows of planned tables, and the batches of all
steps, as a feed sends them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import models, scaling_step, workloads
from jrec.app.report.running_auc import RunningAuc
from jrec.mesh.route import AXIS
from jrec.nn import binary_cross_entropy
from jrec.ops.dispatch import Implementation
from jrec.run.step import FlatState, HostRows, Metrics, StackRows, StepBatch, StepOn, compile_run

STEPS = 16  # of a dispatch, as `jrec train` takes on a GPU

# Of the steps that pages speak of: the workload, and the batch of a device.
MODELS = {
    "kaggle": ("kaggle", 2048),
    "kaggle, large batch": ("kaggle", 16_384),
    "dcnv2": ("mlperf-dcnv2", 6912),
    "rm1": ("rm1", 2048),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A jitted step, or steps, and the shapes of its arguments.

    Attributes:
      step_on: The function that a run calls.
      state, rows, host, batch, metrics: Its arguments.
    """

    step_on: StepOn
    state: FlatState
    rows: StackRows
    host: HostRows
    batch: StepBatch
    metrics: Metrics

    @property
    def arguments(self) -> tuple[FlatState, StackRows, HostRows, StepBatch, Metrics]:
        """All arguments, in their order."""
        return self.state, self.rows, self.host, self.batch, self.metrics

    def lower(self, platform: str = "cuda") -> jax.stages.Lowered:
        """The program, lowered for a platform."""
        return self.step_on.trace(*self.arguments).lower(lowering_platforms=(platform,))


def workload_of(model: str) -> workloads.Workload:
    """One of ``MODELS`` at its batch, with all rows."""
    name, batch = MODELS[model]
    return workloads.WORKLOADS[name].with_batch(batch)


def dispatched(
    model: workloads.Workload | scaling_step.Setup,
    *,
    steps: int = STEPS,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    implementation: Implementation | None = "pallas",
    batch: StepBatch | None = None,
) -> Dispatch:
    """The program of ``steps`` steps with row-wise Adagrad.

    Args:
      model: A workload on one device, or planned for several.
      steps: Steps of a dispatch.
      dtype: The dense layers'.
      mesh: The devices, those of the plan; of a workload one. None for the default device.
      implementation: The embedding ops'.
      batch: The batch of one step, in NumPy arrays; None for one of the model, in as many windows as it needs.
    """
    if isinstance(model, scaling_step.Setup):
        assert mesh is not None
        return _planned(model, steps, dtype, mesh, implementation, batch)
    made = functools.partial(models.modules, model, dtype=dtype, implementation=implementation)
    state, run = compile_run(*nnx.eval_shape(made))
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    given = StepBatch(batch=models.batch(model, seed=0)) if batch is None else batch
    return Dispatch(
        step_on=run.with_loss(binary_cross_entropy, 1),
        state=_shapes(FlatState.of(state), place),
        rows={},
        host={},
        batch=_stacked(given, steps, place, at=0),
        metrics=_shapes(RunningAuc.empty(), place),
    )


def _planned(
    setup: scaling_step.Setup,
    steps: int,
    dtype: str,
    mesh: Mesh,
    implementation: Implementation | None,
    batch: StepBatch | None,
) -> Dispatch:
    """Over the mesh of a plan."""
    made = functools.partial(scaling_step.modules, setup, dtype=dtype, implementation=implementation)
    state, run = compile_run(*nnx.eval_shape(made), mesh=mesh, communication=scaling_step.together(setup))
    if batch is None:
        (batch,) = scaling_step.mesh_batches(setup, [scaling_step.partitioned_of(setup, seed=0)], windows=True)
    everywhere, over = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(AXIS)))
    return Dispatch(
        step_on=run.with_loss(binary_cross_entropy, 1),
        state=_shapes(FlatState.of(state), everywhere),
        rows=scaling_step.abstract_rows(setup, mesh),
        host={},
        batch=_stacked(batch, steps, over, at=1),
        metrics=_shapes(RunningAuc.empty(devices=setup.devices), over),
    )


def _shapes[T](tree: T, place: NamedSharding | None) -> T:
    """Arrays as shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def _stacked(batch: StepBatch, steps: int, place: NamedSharding | None, *, at: int) -> StepBatch:
    """The batches of some steps, with an axis of steps ``at`` a place; where rows are found is the same for all."""

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(leaf) if steps == 1 else (*np.shape(leaf)[:at], steps, *np.shape(leaf)[at:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)

    return dataclasses.replace(_shapes(batch, place), batch=jax.tree.map(stacked, batch.batch), steps=steps)
