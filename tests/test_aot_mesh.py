"""The training step of a planned Kaggle DLRM, compiled for 8 H200 of one host and for 2 hosts of 4; and RM2's, sent.

What travels, what is kept, and what waits for what are read off the compiled programs. Run with -s for the bytes beside
the cost model's.
"""

import dataclasses
import functools
import re
import sys
from typing import Any

import aot
import hlo
import jax
import numpy as np
import pytest
import thunks
from grids import some_of

from benchmarks import ahead_of_time, scaling_bytes, scaling_step, workloads
from benchmarks.dispatched import Dispatch, dispatched, workload_of
from jrec.mesh.route import AXIS
from jrec.sharding.hardware import grid, load_hardware

pytestmark = [pytest.mark.aot, aot.needs_environment()]

DEVICES, EXAMPLES = 8, 2048
KAGGLE = workloads.WORKLOADS["kaggle"].with_batch(EXAMPLES * DEVICES)
TWO_HOSTS = grid(
    "h200-2x4", devices=8, devices_per_node=4, memory=112 * 10**9, lookup=4800e9, within=450e9, between=50e9,
    all_reduce=37e9,
)  # fmt: skip
HARDWARE = {1: load_hardware("h200x8"), 2: TWO_HOSTS}


@dataclasses.dataclass(frozen=True)
class Case:
    setup: scaling_step.Setup
    batch: Any
    ledger: list[scaling_bytes.Entry]
    buffers: float  # bytes of the collectives' static sizes that are others'
    program: Dispatch
    compiler_options: dict[str, Any] | None = None

    @property
    def state(self):
        return self.program.state.state

    @property
    def rows(self):
        return self.program.rows

    @functools.cached_property
    def compiled(self):
        return self.program.lower().compile(self.compiler_options)

    @functools.cached_property
    def lines(self):
        """Of the main computation, in the order in which they run."""
        assert "is_scheduled=true" in self.compiled.as_text().splitlines()[0]
        return self.compiled.as_text().split("\nENTRY ")[1].splitlines()

    def bytes_of(self, tree):
        """On one device."""
        leaves = jax.tree.leaves(tree)
        return sum(np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize for x in leaves)


@pytest.fixture(scope="module", params=some_of([1, 2], 1), ids=["8 GPUs", "2 hosts of 4"])
def case(request):
    return make_case(KAGGLE, hosts=request.param)


def make_case(workload, *, hosts=1, compiler_options=None, **how):
    setup = dataclasses.replace(scaling_step.planned(workload, HARDWARE[hosts]), **how)
    partitioned = scaling_step.partitioned_of(setup, seed=0)
    (batch,) = scaling_step.mesh_batches(setup, [partitioned])
    mesh = aot.mesh(DEVICES // hosts, hosts=hosts, axis=AXIS)
    program = dispatched(setup, steps=1, mesh=mesh, implementation="xla", batch=batch)
    lookups = scaling_step.lookups_of(setup, partitioned)
    state = program.state.state
    ledger = scaling_bytes.ledger(setup, lookups, batch, state, counted=True)
    padded = scaling_bytes.ledger(dataclasses.replace(setup, exchange="padded"), lookups, batch, state, counted=True)
    buffers = sum(entry.moved for entry in padded)
    return Case(setup, batch, ledger, buffers, program, compiler_options)


def _parameter(case, array):
    """The name, in HLO, of the parameter that holds one device's part of a float32 array."""
    shape = ",".join(map(str, array.sharding.shard_shape(array.shape)))
    (name,) = re.findall(rf"^ *(%[\w.]+) = f32\[{shape}\]\S* parameter\(", "\n".join(case.lines), re.MULTILINE)
    return name


def test_memory_is_that_of_the_plan(case):
    memory = case.compiled.memory_analysis()
    rows = case.bytes_of(case.rows)
    assert abs(rows / case.setup.cost.memory.max() - 1) < 0.05
    held = rows + case.bytes_of(case.state)
    batch = sum(leaf.nbytes for leaf in jax.tree.leaves(case.batch)) // DEVICES
    assert held <= memory.argument_size_in_bytes <= 1.001 * (held + batch)
    assert rows <= memory.alias_size_in_bytes  # updated in place
    assert memory.temp_size_in_bytes < 0.25 * rows  # no copy of a shard


def test_no_table_travels_and_bytes_are_accounted_for(case):
    found = scaling_step.collectives(case.compiled.as_text(), DEVICES)
    rows = case.bytes_of(case.rows)
    assert max(c.bytes for c in found) < 0.02 * rows
    sys.stdout.write(f"\n{scaling_bytes.table_of(case.ledger)}\n")
    for entry in case.ledger:
        if entry.expected is not None:
            assert entry.real == pytest.approx(entry.expected, rel=0.05), entry.name
    assert sum(c.sent for c in found) == pytest.approx(case.buffers, rel=1e-3)


def test_local_rows_do_not_wait_for_remote_ones(case):
    _check_overlap(case, room_of(case).remote)


def room_of(case):
    return case.batch.places[case.setup.stack].room


def _check_overlap(case, line):
    dim = case.setup.workload.dim
    begins = [i for i, s in enumerate(case.lines) if re.search(rf"= .*f32\[8,{line},{dim}\].* all-to-all-start\(", s)]
    ends = [i for i, s in enumerate(case.lines) if "all-to-all-done(" in s and i > begins[0]]
    between = "\n".join(case.lines[begins[0] : ends[0]])
    ((rows),) = case.rows.values()
    for array in (rows.sharded, rows.replicated):
        assert re.search(rf" fusion\(.*{_parameter(case, array)}\b", between), "a gather does not overlap"
    assert len(re.findall(r" all-(to-all|gather|reduce)[\w-]*\(", between)) == 1  # nothing else is on the network


def test_replicas_gradients_take_the_network_after_the_answers():
    """XLA would join the all-gather of the replicas' rows with those of logits, which wait for the forward pass."""
    case = make_case(KAGGLE, compiler_options={"xla_gpu_all_gather_combine_threshold_bytes": 0})
    count = DEVICES * room_of(case).replicated
    (begin,) = [i for i, s in enumerate(case.lines) if re.search(rf"= .*s32\[{count}\].* all-gather-start\(", s)]
    answered = next(i for i, s in enumerate(case.lines) if "all-to-all-done(" in s)
    assert answered < begin


def test_a_step_with_the_ragged_exchange():
    """Buffers are as large as with padding; what moves is what is real."""
    case = make_case(KAGGLE, exchange="ragged")
    test_no_table_travels_and_bytes_are_accounted_for(case)
    test_memory_is_that_of_the_plan(case)
    text = case.compiled.as_text()
    line, dim = room_of(case).remote, case.setup.workload.dim
    ragged = [c for c in scaling_step.collectives(text, DEVICES) if c.kind == "ragged-all-to-all"]
    assert [c.bytes for c in ragged] == [4 * DEVICES * line * dim] * 2  # rows, and their gradients
    assert not re.search(r"f32\[[\d,]*\]\S* all-to-all", text)  # requests alone are padded
    moved = {entry.name: (entry.real, entry.moved) for entry in case.ledger}
    assert moved["rows"][0] == moved["rows"][1] > 0


def test_rows_and_gradients_in_bfloat16():
    """Half the bytes of rows and of their gradients; nothing of float32 travels between devices beside."""
    case, wide = make_case(KAGGLE, narrow=True), make_case(KAGGLE)
    test_no_table_travels_and_bytes_are_accounted_for(case)
    found = scaling_step.collectives(case.compiled.as_text(), DEVICES)
    line, dim = f"{DEVICES},{room_of(case).remote}", case.setup.workload.dim
    exchanged = [shape for c in found if c.kind == "all-to-all" for shape in c.shapes]
    assert sorted(exchanged) == [f"bf16[{line},{dim}]"] * 2 + [f"s32[{line}]"]
    sent = {name: sum(entry.moved for entry in one.ledger if "rows" in entry.name) for name, one in
            (("narrow", case), ("wide", wide))}  # fmt: skip
    assert sent["narrow"] == sent["wide"] / 2


# Padded bags are sent by the devices of test_aot_memory_centric, too, and 16 bits travel in the test before this one.
@pytest.mark.parametrize(
    ("exchange", "narrow"), some_of([("padded", False), ("ragged", False), ("padded", True)], ("ragged", False))
)
def test_sent_lookups(exchange, narrow):
    """RM2's form, with fewer rows: bags of 80 ids, of which the owners send back sums alone."""
    workload = workloads.WORKLOADS["rm2"].with_rows_capped(20_000).with_batch(64 * DEVICES)
    case = make_case(workload, form="send", exchange=exchange, narrow=narrow)
    sys.stdout.write(f"\n{scaling_bytes.table_of(case.ledger)}\n")
    found = scaling_step.collectives(case.compiled.as_text(), DEVICES)
    assert sum(c.sent for c in found) == pytest.approx(case.buffers, rel=1e-3)
    for entry in case.ledger:
        if entry.expected is not None:
            assert entry.real == pytest.approx(entry.expected, rel=0.05), entry.name
    assert room_of(case).remote == 0
    bags, dim = room_of(case).bags, workload.dim
    dtype = "bf16" if narrow else "f32"
    lines = f"{dtype}[{DEVICES},{bags},{dim}]" if exchange == "padded" else f"{dtype}[{DEVICES * bags},{dim}]"
    kind = "all-to-all" if exchange == "padded" else "ragged-all-to-all"
    wide = [c for c in found if "all-to-all" in c.kind and any("s32" not in shape for shape in c.shapes)]
    assert [(c.kind, c.shapes) for c in wide] == [(kind, (lines,))] * 2  # sums there, gradients back; no row
    rows = case.bytes_of(case.rows)
    assert rows <= case.compiled.memory_analysis().alias_size_in_bytes
    assert max(c.bytes for c in found) < 0.5 * rows


@pytest.fixture(scope="module")
def routed():
    """With the loops over further windows, as a run has them; for 8 GPUs of one host."""
    setup = scaling_step.planned(KAGGLE, HARDWARE[1])
    partitioned = scaling_step.partitioned_of(setup, seed=0)
    (batch,) = scaling_step.mesh_batches(setup, [partitioned], windows=True)
    assert not batch.places[setup.stack].fits
    program = dispatched(setup, steps=1, mesh=aot.mesh(DEVICES, axis=AXIS), implementation="xla", batch=batch)
    return Case(setup, batch, [], 0.0, program)


def test_devices_that_route_copy_no_shard_and_send_no_table(routed):
    memory, rows = routed.compiled.memory_analysis(), routed.bytes_of(routed.rows)
    assert rows <= memory.alias_size_in_bytes  # updated in place, in the loop over windows, too
    assert memory.temp_size_in_bytes < 0.25 * rows
    found = scaling_step.collectives(routed.compiled.as_text(), DEVICES)
    assert max(c.bytes for c in found) < 0.02 * rows


def test_local_rows_of_devices_that_route_do_not_wait_for_remote_ones(routed):
    _check_overlap(routed, room_of(routed).remote)


# The most launches of routing a step, of a step without further windows and of one with them, of a further window of
# lookups and of the update, and of jrec's kernels in the whole program.
@pytest.mark.parametrize(
    ("model", "dtype", "launched", "windows", "ours"),
    # DLRM-DCNv2's kernels are those of its step on one GPU, in test_aot_launches.
    some_of(
        [("kaggle", "float32", (35, 135, 150), (25, 43), 38), ("dcnv2", "bfloat16", (41, 228, 242), (29, 47), 54)],
        ("kaggle", "float32", (35, 135, 150), (25, 43), 38),
    ),
)
def test_steps_as_they_are_dispatched(model, dtype, launched, windows, ours):
    """16 steps in a scan, by jrec's kernels, with the further windows that a run has where its batches need them.

    All steps are routed first. Where one window holds the rows of each, which the host is told once, the scan has no
    loop; else it has two, of as many windows as the devices find. Where collectives and loops may be nodes, too, a step
    of either scan is one CUDA graph.
    """
    workload = workload_of(model)
    setup = scaling_step.planned(workload.with_batch(DEVICES * workload.batch), HARDWARE[1])
    program = dispatched(setup, dtype=dtype, mesh=aot.mesh(DEVICES, axis=AXIS))
    captured = ahead_of_time.program_of(program.lower(), thunks=True, graphs=ahead_of_time.WHOLE_STEP)
    compiled = aot.check_kernels(model, captured)
    text, memory = compiled.executable.as_text(), compiled.executable.memory_analysis()
    steps = [*hlo.launches(text).loops[:1], *(loop for branch in hlo.branches(text) for loop in branch.loops)]
    kernels = sum(kernel.launches for kernel in compiled.kernels)
    for name, loop in zip(("routing", "one window", "windows"), steps, strict=True):
        sys.stdout.write(f"\n{model}, {dtype}, {DEVICES} devices of {workload.batch:,}: {name}: {loop.once}")
    sys.stdout.write(f"\n{kernels} launches of jrec's; temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB\n")
    assert [loop.trips for loop in steps] == [program.batch.steps] * 3
    assert all(sum(loop.once.kinds.values()) <= most for loop, most in zip(steps, launched, strict=True))
    # A sort of the lookups and one of their rows by owner; in the step, one of the rows of each array.
    assert [loop.once.kinds["sort"] for loop in steps] == [2, 2, 2]
    assert kernels <= ours
    assert [[inner.trips for inner in loop.once.loops] for loop in steps] == [[], [], [None, None]]
    assert all(inner.once.total <= most for inner, most in zip(steps[2].once.loops, windows, strict=True))
    rows = sum(
        np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize for x in jax.tree.leaves(program.rows)
    )
    assert rows <= memory.alias_size_in_bytes  # through both branches
    assert memory.temp_size_in_bytes < 0.25 * rows
    (branch,) = [thunk for thunk in thunks.parse(compiled.thunks).inside if thunk.kind == "kConditional"]
    graphs = [graph for scan in branch.inside if scan.kind == "kWhile" for graph in scan.part("body")]
    assert [graph.kind for graph in graphs] == [thunks.COMMAND_BUFFER] * 2
    inside = [[thunk.kind for thunk in graph.every()] for graph in graphs]
    assert sorted(kinds.count("kWhile") for kinds in inside) == [0, 2]
    assert all({"kAllToAll", "kAllReduce", "kAllGather"} <= set(kinds) for kinds in inside)
    # Of what is copied nothing is a row.
    assert not [shape for shape in hlo.copies(text) if re.search(rf",{workload.dim}\]", shape)]
