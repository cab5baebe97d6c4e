"""One device count of ``benchmarks.scaling``: a training step on that many devices, in a process of its own.

    export XLA_FLAGS=--xla_force_host_platform_device_count=4
    python -m benchmarks.scaling_worker --devices 4 --rows 100000 --examples 2048 --steps 10

Prints one JSON object: the step's seconds, its loss, and the bytes of links, counted and expected.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import scaling_bytes, scaling_step, workloads
from jrec.mesh.route import AXIS, MeshRows
from jrec.run.placement.rows import initial_stack, on_mesh
from jrec.sharding.hardware import load_hardware

BATCHES, WARM_UPS = 3, 2


def main() -> None:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="cap on the rows of a table")
    parser.add_argument("--examples", type=int, required=True, help="of each device")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    json.dump(measured(arguments), sys.stdout)


def measured(arguments: argparse.Namespace) -> dict:
    """Figures of one device count."""
    devices = arguments.devices
    workload = workloads.WORKLOADS["kaggle"].with_rows_capped(arguments.rows).with_batch(arguments.examples * devices)
    setup = scaling_step.planned(workload, load_hardware("h200x8", devices=devices))
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    state, run = scaling_step.compiled(setup, mesh)
    specs = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put(state, specs)
    rows = {
        stack.name: initial_stack(stack, setup.plan, mesh, jax.random.key(0), scaling_step.OPTIMIZER)
        for stack in setup.layout.planned_stacks
    }
    assert all(isinstance(of, MeshRows) for of in rows.values())
    partitioned = [scaling_step.partitioned_of(setup, seed=seed) for seed in range(BATCHES)]
    batches = [on_mesh(batch, mesh) for batch in scaling_step.mesh_batches(setup, partitioned)]
    seconds, losses = [], []
    for step in range(WARM_UPS + arguments.steps):
        began = time.perf_counter()
        state, rows, _, seen = run.step_on(state, rows, {}, batches[step % BATCHES])
        losses.append(float(seen.loss))
        if step >= WARM_UPS:
            seconds.append(time.perf_counter() - began)
    lookups = [scaling_step.lookups_of(setup, of) for of in partitioned]
    counted = np.mean([scaling_bytes.link_bytes(setup, of) for of in lookups], axis=0)
    ledger = scaling_bytes.ledger(setup, lookups[0], batches[0], state)
    return {
        "seconds": statistics.median(seconds),
        "losses": losses,
        "counted": counted.tolist(),
        "expected": setup.cost.link_bytes.tolist(),
        "real": sum(entry.real for entry in ledger),
        "moved": sum(entry.moved for entry in ledger),
    }


if __name__ == "__main__":
    main()
