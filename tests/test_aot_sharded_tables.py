"""Tables divided by rows under plain ``jit`` on GPUs: kernels refuse them, XLA and ``shard_map`` keep them divided."""

import functools
import re

import aot
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrec import ops

pytestmark = [pytest.mark.aot, aot.needs_environment()]

ROWS, DIM, BAGS, LENGTH, AXIS = 4096, 64, 64, 8, "devices"
REFUSAL = r"a table of shape \(4096, 64\) is divided as .*inside jax.shard_map"
MESHES = {"8 GPUs": (8, 1), "2 hosts of 4": (4, 2)}


def _step(table, ids, implementation):
    activations, residuals = ops.lookup({"t": table}, {"t": ops.Bags(ids=ids)}, implementation=implementation)
    optimizer = ops.SGD(learning_rate=0.1)
    new, _ = ops.apply_gradients(
        optimizer, {"t": table}, {"t": {}}, residuals, activations, implementation=implementation
    )
    return activations["t"], new["t"]


def _embedding_bag(table, ids, implementation):
    return ops.embedding_bag(table, ids, implementation=implementation)


def _row_update(table, ids, implementation):
    rows = jnp.arange(BAGS, dtype=jnp.int32)
    gradients = jnp.ones((BAGS, DIM), jnp.float32) * ids.astype(jnp.float32)[:, :1]
    new, _ = ops.row_update(ops.SGD(learning_rate=0.1), table, {}, rows, gradients, implementation=implementation)
    return new


def _compiled(function, devices, hosts, *specs):
    mesh = aot.mesh(devices, hosts=hosts, axis=AXIS)
    table, ids = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(((ROWS, DIM), (BAGS, LENGTH)), (jnp.float32, jnp.int32), specs, strict=True)
    )
    return jax.jit(function).trace(table, ids).lower(lowering_platforms=("cuda",)).compile().as_text()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("function", [_step, _embedding_bag, _row_update])
def test_a_kernel_refuses_a_divided_table(function, mesh):
    with pytest.raises(Exception, match=REFUSAL):
        _compiled(functools.partial(function, implementation="pallas"), *MESHES[mesh], P(AXIS), P())


@pytest.mark.parametrize("mesh", MESHES)
def test_a_chosen_kernel_refuses_a_divided_table(mesh, monkeypatch):
    monkeypatch.setattr("jrec.ops.dispatch.gpu_choice", lambda kernel: "pallas")
    with pytest.raises(Exception, match=REFUSAL):
        _compiled(functools.partial(_step, implementation=None), *MESHES[mesh], P(AXIS), P(AXIS))


@pytest.mark.parametrize("mesh", MESHES)
def test_xla_keeps_a_divided_table_divided(mesh):
    text = _compiled(functools.partial(_step, implementation="xla"), *MESHES[mesh], P(AXIS), P(AXIS))
    assert not re.search(rf"\[{ROWS},", text)


def test_a_kernel_takes_a_whole_table_and_divided_bags():
    text = _compiled(functools.partial(_step, implementation="pallas"), 8, 1, P(), P(AXIS))
    assert "mosaic_gpu" in text


def test_a_kernel_takes_the_rows_of_a_device_in_shard_map():
    mesh = aot.mesh(8, hosts=1, axis=AXIS)
    step = functools.partial(_step, implementation="pallas")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P(AXIS), check_vma=False)
    text = _compiled(mapped, 8, 1, P(AXIS), P(AXIS))
    assert "mosaic_gpu" in text
    assert not re.search(rf"\[{ROWS},", text)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_kernel_updates_a_donated_table_where_it_lies(devices):
    mesh = aot.mesh(devices, hosts=1, axis=AXIS)
    table, ids = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
        for shape, dtype in (((1 << 18, DIM), jnp.float32), ((BAGS, LENGTH), jnp.int32))
    )
    step = jax.jit(functools.partial(_step, implementation="pallas"), donate_argnums=0)
    memory = step.trace(table, ids).lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * table.size
    assert memory.temp_size_in_bytes < table.size
