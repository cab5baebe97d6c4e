"""What waits for the network on a mesh, and what the network waits for, read off the traced programs.

``tests/test_aot_mesh.py`` reads the same off the schedules that XLA makes for GPUs.
"""

import re

import dependence
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest

DEVICES, ROWS, DIM = 4, 40, 4


def _case():
    rng = np.random.default_rng(0)
    placed = mesh_cases.random_placement(rng, ROWS, DEVICES, tiers=(0, 1, 2))
    route = mesh_cases.routes(placed, [np.arange(ROWS)] * DEVICES, ROWS)
    return mesh_cases.mesh_rows(placed, np.zeros((ROWS, DIM), np.float32), {}), route


def _name(path):
    """ "sharded" or "own" of "[0].sharded" or "[1].own.rows"; the argument's number of what has no name."""
    return re.sub(r"^\[\d\]\.(\w+).*", r"\1", path)


def test_a_devices_own_rows_wait_for_no_collective():
    traced = mesh_cases.retrieve_program(DEVICES).trace(*_case())
    found = dependence.operations(traced, _name)
    read = {("sharded", "own"): [], ("host", "own"): [], ("replicated", "replicated"): [], ("sharded", "remote"): []}
    for operation in found:
        if operation.name == "gather":
            table, rows = operation.operands
            for (source, asker), waits in read.items():
                if source in table and asker in rows:
                    waits.append(rows & dependence.COLLECTIVES)
    requests = frozenset(("all_to_all",))
    nothing = frozenset()
    assert read == {
        ("sharded", "own"): [nothing], ("host", "own"): [nothing], ("replicated", "replicated"): [nothing],
        ("sharded", "remote"): [requests],
    }  # fmt: skip
    # They are put in their places before the others' rows are there, too.
    placed = [operation.operands for operation in found if operation.name.startswith("scatter")]
    assert [bool(frozenset().union(*operands) & dependence.COLLECTIVES) for operands in placed] == [False, False, True]


@pytest.mark.parametrize("reduce", ["local", "dense", "all_gather"])
def test_gradients_of_replicated_rows_take_the_network_after_the_backward_pass(reduce):
    rows, route = _case()
    optimizer = mesh_cases.OPTIMIZERS["sgd"]
    program = mesh_cases.update_program(optimizer, DEVICES, reduce=reduce)
    gradients = jnp.zeros((DEVICES, ROWS, DIM))
    found = dependence.operations(program.trace(rows, route, gradients, jnp.int32(0), None), _name)
    sums = [o for o in found if o.name in ("all_gather", "psum") and "replicated" in frozenset().union(*o.operands)]
    assert len(sums) == 2
    for collective in sums:
        assert "[2]" in frozenset().union(*collective.operands), f"{collective.name} waits for no gradient"
