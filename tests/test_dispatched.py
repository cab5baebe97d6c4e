"""The program that gates compile and benchmarks time is the one that a run dispatches."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import jrec
from benchmarks import models, scaling_step, workloads
from benchmarks.dispatched import dispatched
from jrec.app.report.running_auc import RunningAuc
from jrec.mesh.route import AXIS
from jrec.sharding.hardware import load_hardware

STEPS, DEVICES = 3, 4
WORKLOAD = workloads.Workload(
    name="small", rows=(500, 30), dim=8, ids_per_bag=(2, 2), batch=16, num_dense=4, bottom=(16, 8), top=(16, 1),
    cross_layers=1, cross_rank=4,
)  # fmt: skip


def _called(run, metrics, batches, steps):
    """The arguments of a run's first dispatch, and its program."""
    compiled, calls = run._state.compiled, []

    def recorded(loss, slices):
        step_on = compiled.with_loss(loss, slices)

        def call(*arguments):
            calls.append((arguments, str(step_on.trace(*arguments).jaxpr)))
            return step_on(*arguments)

        return call

    run._state.compiled = dataclasses.replace(compiled, with_loss=recorded)
    step = run.compile(metrics=metrics)
    with run.feed(itertools.cycle(batches), steps=lambda _: steps) as feed:
        step(next(feed))
    run.close()
    return calls[0]


def _described(tree):
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), [(leaf.shape, str(leaf.dtype)) for leaf in leaves]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_takes_the_program(dtype):
    run = jrec.distribute(*models.modules(WORKLOAD, dtype=dtype), cast="none")
    batches = [models.batch(WORKLOAD, seed=seed) for seed in range(STEPS)]
    arguments, program = _called(run, RunningAuc.empty(), batches, STEPS)
    expected = dispatched(WORKLOAD, steps=STEPS, dtype=dtype, implementation=None)
    assert _described(expected.arguments) == _described(arguments)
    assert str(expected.step_on.trace(*expected.arguments).jaxpr) == program


@pytest.mark.parametrize("steps", [1, STEPS])
def test_a_mesh_takes_the_program(steps):
    workload = WORKLOAD.with_batch(8 * DEVICES)
    setup = scaling_step.planned(workload, load_hardware("h200x8", devices=DEVICES))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,))
    run = jrec.distribute(*scaling_step.modules(setup), mesh=mesh, plan=setup.plan, cast="none")
    batches = [models.batch(workload, seed=seed, planned=True) for seed in range(steps)]
    arguments, program = _called(run, RunningAuc.empty(devices=DEVICES), batches, steps)
    # The room for rows of other devices is what the run's first batches needed.
    taken = arguments[3]
    one = taken if steps == 1 else dataclasses.replace(
        taken, steps=1, batch=jax.tree.map(lambda leaf: leaf[:, 0], taken.batch)
    )  # fmt: skip
    expected = dispatched(setup, steps=steps, mesh=mesh, implementation=None, batch=one)
    assert _described(expected.arguments) == _described(arguments)
    assert str(expected.step_on.trace(*expected.arguments).jaxpr) == program
    own = dispatched(setup, steps=steps, mesh=mesh, implementation=None).batch
    assert _described(own.batch) == _described(taken.batch)
