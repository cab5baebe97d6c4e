"""A training step of which 4 of 8 H200 keep the tables and 4 run the dense model, compiled without any.

RM2's form, with fewer rows: bags of 80 ids. Run with -s for the bytes beside the cost model's.
"""

import dataclasses
import re
import sys

import aot
import jax
import numpy as np
import pytest
from grids import some_of

from benchmarks import scaling_bytes, scaling_modes, scaling_step, workloads
from benchmarks.dispatched import dispatched
from jrec.mesh.route import AXIS
from jrec.sharding.modes import expected_traffic

pytestmark = [pytest.mark.aot, aot.needs_environment()]

DEVICES, EXAMPLES = 8, 128
KEEPERS = scaling_modes.APART.tables_on


@dataclasses.dataclass(frozen=True)
class Case:
    setup: scaling_step.Setup
    parts: list
    batch: object
    state: object
    rows: object
    compiled: jax.stages.Compiled
    text: str


@pytest.fixture(scope="module", params=some_of(["padded", "ragged"], "padded"))  # ragged: test_aot_mesh
def case(request):
    workload = workloads.WORKLOADS["rm2"].with_rows_capped(20_000).with_batch(EXAMPLES * (DEVICES - len(KEEPERS)))
    setup = scaling_step.planned(workload, scaling_modes.APART)
    setup = dataclasses.replace(setup, form="send", exchange=request.param)
    partitioned = scaling_step.partitioned_of(setup, seed=0)
    (batch,) = scaling_step.mesh_batches(setup, [partitioned])
    program = dispatched(setup, steps=1, mesh=aot.mesh(DEVICES, axis=AXIS), implementation="xla", batch=batch)
    compiled, lookups = program.lower().compile(), scaling_step.lookups_of(setup, partitioned)
    return Case(setup, lookups, batch, program.state.state, program.rows, compiled, str(compiled.as_text()))


def test_sums_and_their_gradients_alone_travel(case):
    setup, workload = case.setup, case.setup.workload
    entries = scaling_bytes.link_entries(setup, case.parts, case.batch)
    expected, counted = (
        scaling_modes.counted_traffic(setup.problem, setup.plan, workloads.table_ids(workload, seed=0))
        if real
        else expected_traffic(setup.problem, setup.plan)
        for real in (False, True)
    )
    found = scaling_step.collectives(case.text, DEVICES)
    lines = [scaling_bytes.table_of(entries), f"{'collective':20} {'bytes of a device':>18}  shapes"]
    lines += [f"{c.kind:20} {c.bytes:18,}  {', '.join(c.shapes)}" for c in found]
    lines.append(f"all links: {expected.bytes_of('send'):,.0f} bytes expected, {counted.bytes_of('send'):,.0f} counted")
    lines.append(f"if rows were retrieved: {expected.bytes_of('retrieve'):,.0f} expected")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert sum(e.real for e in entries) * DEVICES == pytest.approx(expected.bytes_of("send"), rel=0.05)
    assert counted.bytes_of("send") == pytest.approx(expected.bytes_of("send"), rel=0.05)
    # Nothing asks for rows, and of float32 only lines of bags cross: sums, and their gradients back.
    room = case.batch.places[setup.stack].room
    assert room.remote == 0
    bags = room.bags
    shape = f"f32[{DEVICES},{bags},{workload.dim}]"
    kind = "all-to-all"
    if setup.exchange == "ragged":
        kind, shape = "ragged-all-to-all", f"f32[{DEVICES * bags},{workload.dim}]"
    wide = [c for c in found if "all-to-all" in c.kind and any(s.startswith("f32") for s in c.shapes)]
    assert [(c.kind, c.shapes) for c in wide] == [(kind, (shape,))] * 2
    rest = {s for c in found if "all-to-all" in c.kind and c not in wide for s in c.shapes}
    assert all(s.startswith("s32") for s in rest), rest


def test_dense_gradients_are_summed_where_they_are(case):
    """Over the devices that compute; over all only counts, the loss, and a line that stands for no replicas."""
    groups = "replica_groups={{4,5,6,7},{0},{1},{2},{3}}"
    among, others = 0, 0
    for line in case.text.splitlines():
        reduced = [c.bytes for c in scaling_step.collectives(line, DEVICES) if c.kind == "all-reduce"]
        among += sum(reduced) if groups in line else 0
        others += 0 if groups in line else sum(reduced)
    dense = [leaf for leaf in jax.tree.leaves(case.state[0]) if leaf.dtype == jax.numpy.float32]  # not the rows' key
    assert among == sum(4 * leaf.size for leaf in dense)
    assert others <= 4 * (case.setup.workload.dim + 4)


def test_devices_that_keep_tables_do_not_multiply_matrices(case):
    """All products are in a branch of a conditional, which the others alone take."""
    products = re.compile(r"cublas|gemm|\bdot")
    entry = [line.split(", metadata")[0] for line in case.text.split("\nENTRY ")[1].splitlines()]
    assert products.search(case.text)
    assert any(" conditional(" in line for line in entry)
    assert [line for line in entry if products.search(line)] == []


def test_shards_are_updated_in_place(case):
    memory = case.compiled.memory_analysis()
    rows = sum(
        np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize for x in jax.tree.leaves(case.rows)
    )
    assert rows <= memory.alias_size_in_bytes
    assert set(case.setup.plan.owner.tolist()) == set(KEEPERS)
