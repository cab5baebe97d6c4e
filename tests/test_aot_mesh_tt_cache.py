"""The step of a cached tensor-train table compiles for 8 H200, and what its devices tell each other is little."""

import aot
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from benchmarks.scaling_step import abstract, collectives
from jrec.mesh.communication import Communication
from jrec.mesh.route import AXIS
from jrec.mesh.step import StepOptions
from jrec.nn.tt_stack import TTOptions, TTStack
from jrec.ops import Bags, RowWiseAdagrad
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.tt import TTCacheConfig, TTShape
from jrec.tiers.store import Context

pytestmark = [pytest.mark.aot, aot.needs_environment()]

DEVICES, LOOKUPS, CACHED = 8, 2048, 1013
SHAPE = TTShape.search(10_131_227, 16, ranks=32)


def test_lookups_cached_rows_and_core_gradients_are_all_that_travels():
    optimizer, mesh = RowWiseAdagrad(learning_rate=0.1), aot.mesh(DEVICES, axis=AXIS)
    table = TableConfig(name="C3", rows=SHAPE.rows, dim=16, tier="tt", tt_shape=SHAPE)
    (stack,) = EmbeddingLayout.build([table], [FeatureConfig(name="C3", table="C3")]).members
    options = TTOptions(caches={"C3": TTCacheConfig(cache_rows=CACHED, track_every=2)})
    graph, state = nnx.split(nnx.eval_shape(lambda: TTStack(stack, jax.random.key(0), options=options)))
    slots = jax.eval_shape(lambda state: nnx.merge(graph, state).init_slots(optimizer), state)

    def train(state, slots, ids, gradients, step):
        module = nnx.merge(graph, state)
        context = Context(options=StepOptions(step=step), optimizer=optimizer, communication=Communication())
        store = module.store(slots)
        out, residuals = store.lookup(Bags(ids=ids), context).finish(None)
        new = store.update(residuals, gradients, context).step(context.options).finish(None)
        module.put(new)
        return nnx.state(module), new.slots, out

    over, everywhere = PartitionSpec(AXIS), PartitionSpec()
    specs = {"in_specs": (everywhere, everywhere, over, over, everywhere), "out_specs": (everywhere, everywhere, over)}
    mapped = jax.shard_map(train, mesh=mesh, **specs, check_vma=False)

    ids = jax.ShapeDtypeStruct((DEVICES * LOOKUPS, 1), jnp.int32)
    gradients = jax.ShapeDtypeStruct((DEVICES * LOOKUPS, 16), jnp.float32)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    kept, partitioned = abstract((state, slots, step), mesh, everywhere), abstract((ids, gradients), mesh, over)
    arguments = kept[0], kept[1], *partitioned, kept[2]
    traced = jax.jit(mapped, donate_argnums=(0, 1)).trace(*arguments)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    found = collectives(compiled.as_text() or "", DEVICES)
    gathered = sum(c.bytes for c in found if c.kind == "all-gather")
    reduced = sum(c.bytes for c in found if c.kind == "all-reduce")
    # Every device's lookups, in tracked steps, and places of cached rows; then these rows' gradients and the cores'.
    assert gathered == 4 * DEVICES * (LOOKUPS + CACHED)
    cores = 4 * (SHAPE.num_parameters + sum(SHAPE.row_factors))
    assert reduced == pytest.approx(cores + 4 * 16 * CACHED, rel=0.01)
    assert {c.kind for c in found} == {"all-gather", "all-reduce"}
