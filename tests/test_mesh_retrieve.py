"""What the devices of a mesh retrieve equals the rows of the stack, whatever the placement."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from mesh_cases import HOST, REPLICATED, SHARDED

from jrec.mesh.route import GatherMap, MeshRows, Route, check_view


def _case(seed, devices, rows, dim, dtype, tiers):
    rng = np.random.default_rng(seed)
    placed = mesh_cases.random_placement(rng, rows, devices, tiers=tiers)
    sizes = rng.integers(0, rows + 1, devices) * rng.integers(0, 2, devices)
    uniques = [np.sort(rng.choice(rows, size, replace=False)) for size in sizes]
    table = rng.normal(size=(rows, dim)).astype(np.float32)
    return rng, placed, uniques, np.asarray(jnp.asarray(table, dtype))


def _check(seed, devices, rows, dim, dtype, tiers):
    rng, placed, uniques, table = _case(seed, devices, rows, dim, dtype, tiers)
    capacity = max(1, *(u.size for u in uniques)) + int(rng.integers(3))
    route = mesh_cases.routes(placed, uniques, capacity, room=int(rng.integers(2)))
    got = mesh_cases.retrieved(mesh_cases.mesh_rows(placed, table, {}), route)
    assert got.dtype == table.dtype
    for device, unique in enumerate(uniques):
        np.testing.assert_array_equal(got[device, : unique.size], table[unique])
        np.testing.assert_array_equal(got[device, unique.size :], 0)


def test_rows_of_all_tiers():
    _check(2, 4, 40, 4, "bfloat16", (SHARDED, REPLICATED, HOST))


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 40),
    st.sampled_from([1, 4, 7]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([(SHARDED,), (REPLICATED,), (HOST,), (SHARDED, REPLICATED), (SHARDED, REPLICATED, HOST)]),
)
def test_rows_are_those_of_the_stack(seed, devices, rows, dim, dtype, tiers):
    _check(seed, devices, rows, dim, dtype, tiers)


def _views(**changes):
    def picks(*shape):
        return GatherMap(rows=jnp.zeros(shape, jnp.int32), at=jnp.zeros(shape, jnp.int32))

    tiers = {"replicated": picks(3), "own": picks(2), "remote": picks(1, 2)}
    rows = {"sharded": jnp.zeros((5, 4)), "replicated": jnp.zeros((2, 4))}
    rows |= {k: v for k, v in changes.items() if isinstance(v, jax.Array)}
    tiers |= {k: picks(*v) if isinstance(v, tuple) else v for k, v in changes.items() if not isinstance(v, jax.Array)}
    return MeshRows(**rows), Route(capacity=4, **tiers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicated": jnp.zeros((0, 4))}, "replicated rows must be .* at least one, but have shape .0, 4"),
        ({"replicated": jnp.zeros((3, 8))}, r"replicated rows must be \(rows, 4\)"),
        ({"own": (1, 2)}, "rows and places of own must be int32 of one shape of 1 dimension.*local_view takes"),
        ({"remote": (3,)}, "rows and places of remote must be int32 of one shape of 2 dimension"),
        ({"own": GatherMap(rows=jnp.zeros(2), at=jnp.zeros(2, jnp.int32))}, "must be int32 .* but are .*float32"),
        ({"remote": (4, 0)}, "no place for remote rows; give it at least one of padding"),
    ],
)
def test_views_of_other_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_view(*_views(**changes))
