"""What the devices of a mesh retrieve equals the rows of the stack, whatever the placement."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import mesh_cases
import numpy as np
from mesh_cases import HOST, REPLICATED, SHARDED


def _case(seed, devices, rows, dim, dtype, tiers):
    rng = np.random.default_rng(seed)
    placed = mesh_cases.random_placement(rng, rows, devices, tiers=tiers)
    sizes = rng.integers(0, rows + 1, devices) * rng.integers(0, 2, devices)
    uniques = [np.sort(rng.choice(rows, size, replace=False)) for size in sizes]
    table = rng.normal(size=(rows, dim)).astype(np.float32)
    return rng, placed, uniques, np.asarray(jnp.asarray(table, dtype))


@hypothesis.settings(max_examples=6)
@hypothesis.given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 40),
    st.sampled_from([1, 4, 7]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([(SHARDED,), (REPLICATED,), (HOST,), (SHARDED, REPLICATED), (SHARDED, REPLICATED, HOST)]),
)
def test_rows_are_those_of_the_stack(seed, devices, rows, dim, dtype, tiers):
    rng, placed, uniques, table = _case(seed, devices, rows, dim, dtype, tiers)
    capacity = max(u.size for u in uniques) + int(rng.integers(3))
    route = mesh_cases.routes(placed, uniques, capacity, room=int(rng.integers(2)))
    host = jnp.asarray(placed.spread(table)[2])
    got = mesh_cases.retrieved(mesh_cases.mesh_rows(placed, table, {}), route, host)
    assert got.dtype == table.dtype
    for device, unique in enumerate(uniques):
        np.testing.assert_array_equal(got[device, : unique.size], table[unique])
        np.testing.assert_array_equal(got[device, unique.size :], 0)
