"""A step on a mesh equals the step of one device, over placements, optimizers, dtypes and forms of all-reduce.

Sums of float32 gradients are associated differently: by device, and those of the devices in their order. Integer-valued
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
from jax.sharding import PartitionSpec as P
from mesh_cases import HOST, OPTIMIZERS, REPLICATED, SHARDED

from jrec.mesh.allreduce import SharedGradients, shared_gradients
from jrec.mesh.communication import Communication
from jrec.mesh.exchange import Exchange, Links
from jrec.mesh.route import AXIS, GatherMap, MeshRows, Route
from jrec.mesh.step import StepOptions
from jrec.mesh.update import RowGradients
from jrec.ops.tensor_cast import tensor_cast


def _case(seed, devices, rows, dim, dtype, optimizer, *, tiers=(SHARDED, REPLICATED, HOST), integers=False):
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
    pairs = {"table": (placed.gather(got.sharded, got.replicated, got.host), table)}
    for name, slot in slots.items():
        arrays = (got.sharded_slots[name], got.replicated_slots[name], got.host_slots[name])
        pairs[name] = (placed.gather(*arrays), slot)
    for name, (mine, theirs) in pairs.items():
        if exact:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        else:
            as_float = [np.asarray(a, np.float32) for a in (mine, theirs)]
            np.testing.assert_allclose(*as_float, rtol=tolerance, atol=tolerance, err_msg=name)


def _check(name, seed, devices, rows, reduce):
    optimizer = OPTIMIZERS[name]
    placed, uniques, capacity, table, slots, gradients = _case(seed, devices, rows, 4, "float32", optimizer)
    route = mesh_cases.routes(placed, uniques, capacity)
    got = mesh_cases.updated(optimizer, mesh_cases.mesh_rows(placed, table, slots), route, gradients, reduce=reduce)
    _compare(placed, got, mesh_cases.single(optimizer, table, slots, uniques, gradients))


def test_a_step_equals_one_device():
    _check("adam", 3, 4, 30, "local")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@hypothesis.settings(max_examples=3)
@hypothesis.given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 30),
    st.sampled_from(["local", "all_gather", "dense"]),
)
def test_equals_one_device(name, seed, devices, rows, reduce):
    _check(name, seed, devices, rows, reduce)


def _exact(dtype, reduce):
    optimizer = OPTIMIZERS["sgd"]
    case = _case(5, 4, 25, 4, dtype, optimizer, integers=True)
    placed, uniques, capacity, table, slots, gradients = case
    key = jax.random.key_data(jax.random.key(3)) if dtype != "float32" else None
    route = mesh_cases.routes(placed, uniques, capacity)
    rows = mesh_cases.mesh_rows(placed, table, slots)
    got = mesh_cases.updated(optimizer, rows, route, gradients, reduce=reduce, key=key)
    _compare(placed, got, mesh_cases.single(optimizer, table, slots, uniques, gradients, key=key), exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["local", "dense", "all_gather"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_of_integers_are_exact(reduce, dtype):
    _exact(dtype, reduce)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_which_device_has_a_row_changes_no_bit(dtype):
    optimizer, rows = OPTIMIZERS["adagrad"], 25
    case = _case(5, 4, rows, 4, dtype, optimizer)
    _, _, _, table, slots, _ = case
    uniques, capacity = [np.arange(rows)] * 4, rows + 1
    gradients = np.random.default_rng(1).normal(size=(4, capacity, 4)).astype(np.float32)
    key = jax.random.key_data(jax.random.key(3)) if dtype != "float32" else None
    results = []
    for seed, tiers in enumerate([(SHARDED,), (SHARDED,), (HOST,), (SHARDED, HOST)]):
        placed = mesh_cases.random_placement(np.random.default_rng(seed), rows, 4, tiers=tiers)
        route = mesh_cases.routes(placed, uniques, capacity)
        got = mesh_cases.updated(optimizer, mesh_cases.mesh_rows(placed, table, slots), route, gradients, key=key)
        values = placed.gather(got.sharded, got.replicated, got.host)
        sums = [
            placed.gather(*(x[name] for x in (got.sharded_slots, got.replicated_slots, got.host_slots)))
            for name in slots
        ]
        results.append((values, *sums))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_what_does_not_fit_is_refused():
    picks = GatherMap(rows=jnp.zeros(2, jnp.int32), at=jnp.zeros(2, jnp.int32))
    remote = GatherMap(rows=jnp.zeros((1, 2), jnp.int32), at=jnp.zeros((1, 2), jnp.int32))
    route = Route(capacity=4, replicated=picks, own=picks, remote=remote)
    exchange = Exchange(asked=remote.rows, sends=jnp.zeros(1), answers=jnp.zeros(1), links=Links())
    rows = MeshRows(sharded=jnp.zeros((5, 3)), replicated=jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"must be \(4, dim\), one row for each unique row, not \(5, 3\)"):
        RowGradients(rows=rows, route=route, exchange=exchange, gradients=jnp.zeros((5, 3)), options=StepOptions())
    with pytest.raises(ValueError, match="'sum' is unknown; choose one of local, dense, all_gather"):
        shared_gradients(rows.replicated, picks, jnp.zeros((4, 3)), reduce="sum")
    options = StepOptions(rounding_key=jax.random.key_data(jax.random.key(0)))
    with pytest.raises(ValueError, match="by their addresses in the stack, which the route lacks"):
        options.arguments(jnp.zeros((5, 3), jnp.bfloat16), None)
    assert options.arguments(jnp.zeros((5, 3)), None).keys() == {"step", "gradient_scale"}


def test_a_shard_is_updated_in_place():
    """The compiled step needs less memory beside the donated arrays than a tenth of the shard."""
    optimizer, capacity = OPTIMIZERS["rowwise_adagrad"], 40
    placed = mesh_cases.random_placement(np.random.default_rng(0), 60, 4, tiers=(SHARDED, REPLICATED))
    uniques = [np.arange(device, 60, 2) for device in range(4)]
    route = mesh_cases.routes(placed, uniques, capacity)
    table = jnp.zeros((4 * 100_000, 8))
    shard, copies = ({"sum": jnp.zeros(rows)} for rows in (400_000, 50))
    few = {"host": jnp.zeros((8, 8)), "host_slots": {"sum": jnp.zeros(8)}}
    rows = MeshRows(sharded=table, replicated=jnp.zeros((50, 8)), sharded_slots=shard, replicated_slots=copies, **few)
    compiled = (
        mesh_cases.update_program(optimizer, 4).lower(rows, route, jnp.zeros((4, capacity, 8)), 0, None).compile()
    )
    memory = compiled.memory_analysis()
    held = 100_000 * 9 * 4
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 0.1 * held


def test_padding_of_replicated_rows_has_no_part_in_a_norm():
    """Padding takes any row's gradient ("dense"): here the last row's."""
    cast = tensor_cast(jnp.asarray([[0], [2], [-1]], jnp.int32), num_rows=4)
    gradients = SharedGradients(cast=cast, gradients=jnp.full((3, 2), 3.0), summed=True, addresses=None)
    assert float(gradients.squares(jnp.zeros((4, 2), jnp.float32), StepOptions())) == 2 * 2 * 9


@pytest.mark.parametrize(("computes", "first"), [(None, 0), ((False, False, True, True), 2)])
def test_what_all_devices_know_counts_once(computes, first):
    def body(value):
        return Communication(computes=computes).once(value)[None]

    run = jax.shard_map(body, mesh=mesh_cases.mesh(4), in_specs=P(), out_specs=P(AXIS), check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(jnp.float32(5)), 5.0 * (np.arange(4) == first))
