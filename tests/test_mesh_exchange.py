"""Values that swap between devices arrive at their places, whether lines travel whole or only their beginnings."""

import contextlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mesh_cases import ragged_on_cpu

from jrec.mesh.exchange import Exchange, Links, check_kind
from jrec.mesh.route import AXIS, GatherMap, local_view
from jrec.sharding.contents import MAX_SHARD_ROWS, shard_capacity
from jrec.sharding.errors import PlanError

ROWS = 50


def _exchanged(rows, values, kind, types=None):
    devices = rows.shape[0]

    def body(rows, values):
        rows, values = local_view((rows, values))
        exchange = Exchange.open(
            GatherMap(rows=rows, at=rows), shard_rows=ROWS, links=Links(kind=kind, **(types or {}))
        )
        there = exchange.deliver(values)
        return exchange.asked[None], there[None], exchange.answer(there)[None]

    run = jax.shard_map(body, mesh=mesh_cases.mesh(devices), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return [np.asarray(a) for a in jax.jit(run)(rows, values)]


def _requests(rng, devices, line):
    counts = rng.integers(0, line + 1, (devices, devices))
    np.fill_diagonal(counts, 0)
    real = np.arange(line) < counts[..., None]
    rows = np.where(real, rng.integers(0, ROWS, (devices, devices, line)), ROWS).astype(np.int32)
    values = rng.normal(size=(devices, devices, line, 3)).astype(np.float32)
    return real, rows, values


def test_swaps():
    _check(3, 4, 5)


@pytest.mark.slow
@hypothesis.settings(max_examples=6)
@hypothesis.given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.integers(1, 6))
def test_padded_and_ragged_swaps(seed, devices, line):
    _check(seed, devices, line)


def _check(seed, devices, line):
    real, rows, values = _requests(np.random.default_rng(seed), devices, line)
    asked, there, back = _exchanged(rows, values, "padded")
    np.testing.assert_array_equal(asked, rows.swapaxes(0, 1))
    np.testing.assert_array_equal(there, values.swapaxes(0, 1))
    np.testing.assert_array_equal(back, values)
    with ragged_on_cpu():
        asked, there, back = _exchanged(rows, values, "ragged")
    np.testing.assert_array_equal(asked, rows.swapaxes(0, 1))
    np.testing.assert_array_equal(there, np.where(real[..., None], values, 0).swapaxes(0, 1))
    np.testing.assert_array_equal(back, np.where(real[..., None], values, 0))


@pytest.mark.parametrize("kind", ["padded", "ragged"])
def test_values_are_rounded_once_in_each_direction(kind):
    real, rows, values = _requests(np.random.default_rng(3), 2, 6)
    values[real] *= 1e5  # beyond float16, which then arrives as its greatest number
    with ragged_on_cpu():
        _, there, back = _exchanged(rows, values, kind, {"gradients": "bfloat16", "rows": "float16"})
    rounded = np.asarray(jnp.asarray(values).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(there.swapaxes(0, 1)[real], rounded[real])
    halves = np.clip(rounded, -65504, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(back[real], halves[real])
    assert np.any(np.abs(back[real]) == 65504)
    assert back.dtype == np.float32


@pytest.mark.parametrize("dtype", ["int32", "bfloat16"])
def test_numbers_of_rows_and_values_of_16_bits_travel_as_they_are(dtype):
    _, rows, _ = _requests(np.random.default_rng(4), 2, 5)
    values = np.arange(2 * 2 * 5 * 3).reshape(2, 2, 5, 3) * 12_347
    values = np.asarray(jnp.asarray(values, dtype))
    _, there, back = _exchanged(rows, values, "padded", {"gradients": "bfloat16", "rows": "float16"})
    assert there.dtype == back.dtype == values.dtype
    np.testing.assert_array_equal(there, values.swapaxes(0, 1))
    np.testing.assert_array_equal(back, values)


@pytest.mark.slow
def test_a_whole_step_with_the_ragged_exchange():
    rng = np.random.default_rng(1)
    optimizer = mesh_cases.OPTIMIZERS["adagrad"]
    placed = mesh_cases.random_placement(rng, 30, 4, tiers=(mesh_cases.SHARDED, mesh_cases.HOST))
    uniques = [np.sort(rng.choice(30, size, replace=False)) for size in (0, 7, 20, 12)]
    table = rng.normal(size=(30, 4)).astype(np.float32)
    slots = {"sum": np.full((30, 4), 0.1, np.float32)}
    gradients = rng.normal(size=(4, 21, 4)).astype(np.float32)
    route = mesh_cases.routes(placed, uniques, 21)
    results = []
    for kind, patch in (("padded", contextlib.nullcontext()), ("ragged", ragged_on_cpu())):
        with patch:
            rows = mesh_cases.mesh_rows(placed, table, slots)
            found = mesh_cases.retrieved(rows, route, kind=kind)
            new = mesh_cases.updated(optimizer, rows, route, gradients, kind=kind)
        results.append((found, new.sharded, new.sharded_slots["sum"]))
    for padded, ragged in zip(*results, strict=True):
        np.testing.assert_array_equal(padded, ragged)


def test_kinds_that_are_not_there():
    with pytest.raises(ValueError, match="unknown; choose one of padded, ragged"):
        check_kind("quick", "gpu")
    with pytest.raises(ValueError, match="lacks on CPUs; use 'padded'"):
        check_kind("ragged", "cpu")
    check_kind("ragged", "gpu")
    with pytest.raises(ValueError, match="unknown"):
        Exchange.open(
            GatherMap(rows=jnp.zeros((1, 0), jnp.int32), at=jnp.zeros((1, 0), jnp.int32)),
            shard_rows=1,
            links=Links(kind="x"),
        )


class _Plan:
    def __init__(self, *rows):
        self.rows = np.array(rows)

    def shard_rows(self, stack):
        assert stack == "d16_float32"
        return self.rows


def test_shards_whose_offsets_do_not_fit_are_refused():
    assert shard_capacity(_Plan(3, 7), "d16_float32") == 7
    assert shard_capacity(_Plan(0, 0), "d16_float32") == 1
    assert shard_capacity(_Plan(MAX_SHARD_ROWS), "d16_float32") == 2**31 - 2
    with pytest.raises(PlanError, match=r"2,147,483,647 rows of stack d16_float32 on device 1.*plan for more devices"):
        shard_capacity(_Plan(3, 2**31 - 1), "d16_float32")
