"""A step on a mesh equals the step of one device, over placements, optimizers, dtypes and forms of all-reduce.

Sums of float32 gradients are associated differently: own ones first, then those of the other devices. Integer-valued
gradients have exact sums, so there the results are equal to the bit, but for a last bit where XLA fuses the arithmetic
of an optimizer differently in the two programs.
"""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from mesh_cases import OPTIMIZERS, REPLICATED, SHARDED


def _case(seed, devices, rows, dim, dtype, optimizer, *, tiers=(SHARDED, REPLICATED), integers=False):
    rng = np.random.default_rng(seed)
    placed = mesh_cases.random_placement(rng, rows, devices, tiers=tiers)
    sizes = rng.integers(0, rows + 1, devices) * (rng.random(devices) < 0.8)
    uniques = [np.sort(rng.choice(rows, int(size), replace=False)) for size in sizes]
    capacity = max(1, max(u.size for u in uniques)) + 1
    table = np.asarray(jnp.asarray(rng.normal(size=(rows, dim)), jnp.float32).astype(dtype))
    slots = {name: np.abs(rng.normal(size=np.shape(s))).astype(np.float32) for name, s in optimizer.init(table).items()}
    gradients = rng.normal(size=(devices, capacity, dim)).astype(np.float32)
    if integers:
        gradients = np.round(gradients * 4)
    for line, unique in zip(gradients, uniques, strict=True):
        line[unique.size :] = np.nan  # nobody reads what belongs to no row
    return placed, uniques, capacity, table, slots, gradients


def _compare(placed, got, want, *, exact=False, tolerance=2e-5):
    table, slots = want
    pairs = {"table": (placed.gather(got.sharded, got.replicated), table)}
    for name, slot in slots.items():
        pairs[name] = (placed.gather(got.sharded_slots[name], got.replicated_slots[name]), slot)
    for name, (mine, theirs) in pairs.items():
        if exact:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        else:
            as_float = [np.asarray(a, np.float32) for a in (mine, theirs)]
            np.testing.assert_allclose(*as_float, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
@hypothesis.settings(max_examples=2)
@hypothesis.given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 30),
    st.sampled_from([("local", None), ("local", 3), ("local", 20), ("all_gather", None), ("dense", None)]),
)
def test_equals_one_device(name, seed, devices, rows, how):
    reduce, union = how
    optimizer = OPTIMIZERS[name]
    placed, uniques, capacity, table, slots, gradients = _case(seed, devices, rows, 4, "float32", optimizer)
    route = mesh_cases.routes(placed, uniques, capacity, union=union)
    got = mesh_cases.updated(optimizer, mesh_cases.mesh_rows(placed, table, slots), route, gradients, reduce=reduce)
    _compare(placed, got, mesh_cases.single(optimizer, table, slots, uniques, gradients))


@pytest.mark.parametrize("reduce", ["local", "dense", "all_gather"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_integers_are_exact(reduce, dtype):
    optimizer = OPTIMIZERS["sgd"]
    case = _case(5, 4, 25, 4, dtype, optimizer, integers=True)
    placed, uniques, capacity, table, slots, gradients = case
    key = jax.random.key_data(jax.random.key(3)) if dtype == "bfloat16" else None
    route = mesh_cases.routes(placed, uniques, capacity)
    rows = mesh_cases.mesh_rows(placed, table, slots)
    got = mesh_cases.updated(optimizer, rows, route, gradients, reduce=reduce, key=key)
    _compare(placed, got, mesh_cases.single(optimizer, table, slots, uniques, gradients, key=key), exact=True)
