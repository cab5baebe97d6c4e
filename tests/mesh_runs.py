"""A small model, its batches, and its run on one device and on a mesh: what tests of the mesh share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import jax
import mesh_runs
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec import ops
from jrec.batch import Batch
from jrec.data.packing import pack_batch
from jrec.host import HostTable
from jrec.host.pipeline_batch import fetched, read
from jrec.host.ring import Rows
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, TTOptions
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.tt import TTCacheConfig, TTShape
from jrec.sharding.plan import Plan
from jrec.train.mesh_arrays import MeshBatch, Shapes, on_mesh, stacked
from jrec.train.mesh_batch import Dealt, Parts
from jrec.train.mesh_dense import settled
from jrec.train.mesh_forms import Form, Forms
from jrec.train.mesh_host import with_rows
from jrec.train.mesh_plan import plan_stack, planned_stacks
from jrec.train.mesh_rows import initial_rows, local_numbers
from jrec.train.mesh_step import compile_mesh
from jrec.train.mesh_table import whole_stack
from jrec.train.step import compile_run

EXAMPLES, SEED = 24, 3
STACK_ROWS = 500  # no stack has more
SIZES = {"site": 40, "user": 5, "item": 300, "word": 90}
WHOLE_ROWS = 4  # of "item", where it comes in parts
FEATURES = (
    FeatureConfig(name="site", table="site"),
    FeatureConfig(name="user", table="user", max_length=3, pooling="mean"),
    FeatureConfig(name="item", table="item", max_length=6, weighted=True),
    FeatureConfig(name="seen", table="item", max_length=4, pooling="max"),
    FeatureConfig(name="word", table="word", max_length=2),
)
OPTIMIZERS = {
    "sgd": ops.SGD(learning_rate=0.1),
    "momentum": ops.Momentum(learning_rate=0.05),
    "adagrad": ops.Adagrad(learning_rate=0.1, weight_decay=1e-3),
    "rowwise_adagrad": ops.RowWiseAdagrad(learning_rate=0.1, max_row_norm=1.0),
    "rmsprop": ops.RMSProp(learning_rate=0.01),
    "adam": ops.Adam(learning_rate=optax.linear_schedule(0.02, 0.01, 20)),
}


def layout(tier: Any, *, dtype: str = "float32", tt: bool | str = True) -> EmbeddingLayout:
    """Ragged bags of all kinds; one of the tables is a tensor train, and with "parts" all but the first rows of one."""
    tables = []
    for name, rows in SIZES.items():
        if tt == "parts" and name == "item":
            of: dict[str, Any] = {"name": name, "dim": 8, "dtype": dtype, "of_rows": rows}
            tail = TTShape.search(rows - WHOLE_ROWS, 8, ranks=3)
            tables.append(TableConfig(rows=WHOLE_ROWS, tier=tier, **of))
            tables.append(TableConfig(rows=tail.rows, tier="tt", tt_shape=tail, first_row=WHOLE_ROWS, **of))
            continue
        shape = TTShape.search(rows, 8, ranks=3) if tt and name == "word" else None
        tables.append(
            TableConfig(name=name, rows=rows, dim=8, dtype=dtype, tier=tier if shape is None else "tt", tt_shape=shape)
        )
    return EmbeddingLayout.build(tables, FEATURES)


def batches(of: EmbeddingLayout, steps: int, *, examples: int = EXAMPLES) -> list[Batch]:
    """Skewed ids, bags of every length from 0 on; the last of many is not full, and some parts of it are empty."""
    found = []
    for number in range(steps):
        rng = np.random.default_rng(number)
        n = examples if number < steps - 1 or steps == 1 else examples // 3
        columns: dict[str, Any] = {"label": rng.integers(0, 2, n).astype(np.float32)}
        columns |= {f"x{i}": rng.normal(size=n).astype(np.float32) for i in range(3)}
        for feature in FEATURES:
            least = 1 if feature.max_length == 1 else 0
            lengths = rng.integers(least, feature.max_length + 1, n)
            ids = np.full((n, feature.max_length), -1, np.int64)
            for row, length in zip(ids, lengths, strict=True):
                row[:length] = np.minimum(rng.zipf(1.3, length) - 1, SIZES[feature.table] - 1)
            columns[feature.name] = ids[:, 0] if feature.max_length == 1 else ids
            if feature.weighted:
                columns[f"{feature.name}:weight"] = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
        found.append(pack_batch(of, columns, dense=["x0", "x1", "x2"], batch_size=examples))
    return found


def modules(
    of: EmbeddingLayout,
    optimizer: ops.RowOptimizer,
    *,
    dense: optax.GradientTransformation | None = None,
    cache: TTCacheConfig | None = None,
    **kwargs: Any,
) -> tuple[DLRM, SparseOptimizer]:
    """A model, its tensor train with or without a cache, and its optimizer."""
    config = DLRMConfig(num_dense=3, bottom_mlp=(16, 8), top_mlp=(16, 1))
    tt = TTOptions(caches={} if cache is None else {"word": cache})
    model = DLRM(config, of, tt=tt, rngs=nnx.Rngs(params=SEED))
    return model, SparseOptimizer(model, dense=dense or optax.adagrad(0.05), embedding=optimizer, **kwargs)


@dataclasses.dataclass
class Trace:
    """A run: losses and logits of every step, then everything it trained, by name."""

    losses: list[float]
    logits: list[np.ndarray]
    predicted: np.ndarray
    arrays: dict[str, np.ndarray]


def on_one_device(
    optimizer: ops.RowOptimizer, steps: int, *, dtype: str = "float32", tt: bool | str = True, **kwargs: Any
) -> Trace:
    """The run that all meshes must equal."""
    of = layout("device", dtype=dtype, tt=tt)
    model, sparse = modules(of, optimizer, **kwargs)
    state, compiled = compile_run(model, sparse)
    trace = Trace([], [], np.empty(0), {})
    given = batches(of, steps)
    for batch in given:
        state, loss, logits = compiled.step(state, batch)
        trace.losses.append(float(loss))
        trace.logits.append(np.asarray(logits))
    trace.predicted = np.asarray(compiled.predict(state, given[0]))
    trace.arrays = arrays_of(*compiled.merge(state))
    return trace


def arrays_of(model: DLRM, sparse: SparseOptimizer) -> dict[str, np.ndarray]:
    """All that one device trains, by name."""
    arrays = _dense(model, sparse)
    for name, rows in model.embeddings.arrays().items():
        arrays[name] = np.asarray(rows, np.float32)
        for slot, variable in sparse.slots[name].items():
            arrays[f"{name}.{slot}"] = np.asarray(variable[...])
    return arrays


def _dense(model: DLRM, sparse: SparseOptimizer) -> dict[str, np.ndarray]:
    tt = {f"{n}.{i}": a for n, of in model.embeddings.tt.items() for i, a in enumerate(of.arrays())}
    tt |= {f"{n}.cached_{k}": v[...] for n, of in model.embeddings.tt.items() for k, v in of.cached.items()}
    slots = {f"{n}.{s}": v[...] for n in tt_names(model) for s, v in sparse.slots[n].items()}
    dense = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))}
    opt = nnx.state(sparse.dense)
    moments = {f"dense{jax.tree_util.keystr(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(opt)}
    return {k: np.asarray(v, np.float32) for k, v in (tt | slots | dense | moments).items()}


def tt_names(model: DLRM) -> list[str]:
    """Stacks of tensor-train tables."""
    return list(model.embeddings.tt)


def on_mesh_of(
    plan: Plan,
    optimizer: ops.RowOptimizer,
    steps: int,
    *,
    devices: Sequence[Any] | None = None,
    reduce: Any = "local",
    exchange: Any = "padded",
    dtype: str = "float32",
    tt: bool | str = True,
    form: Form = "retrieve",
    send: Set[str] | None = None,
    **kwargs: Any,
) -> Trace:
    """The same run on a mesh of ``plan.devices``; ``send`` names features that send, whatever ``form`` says."""
    of = layout("planned", dtype=dtype, tt=tt)
    mesh = Mesh(np.array((devices or jax.devices())[: plan.devices]), ("devices",))
    model, sparse = modules(of, optimizer, **kwargs)
    state, compiled = compile_mesh(model, sparse, mesh, reduce=reduce, exchange=exchange, computes=plan.computes)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    rows = initial_rows(of, plan, mesh, nnx.Rngs(params=SEED).params(), optimizer)
    tables = host_tables_of(plan, of, optimizer)
    numbers = local_numbers(mesh)
    given = batches(of, steps)
    forms = Forms(of, form)
    if send is not None:
        forms.send = send
    parts = Parts(of, plan, devices=numbers, first=0, count=plan.devices, cast=True, forms=forms)
    if not forms.decided:
        forms.decide([parts(batch).parts for batch in given[:4]], numbers)
    shapes = Shapes(of, plan, examples=EXAMPLES // len(plan.askers), headroom=1.5, send=forms.send)
    made = [parts(batch) for batch in given]
    for each in made:
        shapes.fit(each.parts, numbers)

    def placed(dealt: Dealt, fetch: Any) -> MeshBatch:
        shapes.fit(dealt.parts, numbers)
        found = {name: _filled(fetch(tables[name], held, STACK_ROWS)) for name, held in dealt.host.items()}
        return with_rows(on_mesh(stacked(dealt.parts, numbers, shapes), mesh), found, mesh)

    trace = Trace([], [], np.empty(0), {})
    for each in made:
        if plan.computes is not None:
            state = _spoiled(state, mesh, plan.computes)
        state, rows, seen = compiled.step(state, rows, placed(each, fetched))
        for name, held in each.host.items():
            new = jax.tree.map(lambda array, n=held.size: np.array(array[:n]), seen.host[name])
            tables[name].store(held, new.values, new.slots)
        trace.losses.append(float(seen.loss))
        trace.logits.append(np.asarray(seen.logits))
    first = placed(made[0], read)
    if plan.computes is not None:  # nothing may read what devices without examples keep of dense parameters
        state = settled(mesh, plan.computes)(_spoiled(state, mesh, plan.computes))
        trace.predicted = np.asarray(compiled.predict(_spoiled(state, mesh, plan.computes), rows, first))
    else:
        trace.predicted = np.asarray(compiled.predict(state, rows, first))
    model, sparse = compiled.merge(state)
    trace.arrays = _dense(model, sparse)
    for stack in planned_stacks(of):
        name = plan_stack(stack)
        values, slots = whole_stack(stack, plan, rows[stack.name], tables.get(stack.name))
        trace.arrays[name] = np.asarray(values, np.float32)
        trace.arrays |= {f"{name}.{slot}": array for slot, array in slots.items()}
    return trace


def _spoiled(state: Any, mesh: Mesh, computes: Sequence[bool]) -> Any:
    """A state whose floats are NaN on devices that do not compute."""

    def spoil(leaf: jax.Array) -> jax.Array:
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        bad = np.full(leaf.shape, np.nan, leaf.dtype)
        of_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        arrays = [
            of_device[d] if computing else jax.device_put(bad, d)
            for d, computing in zip(mesh.devices.flat, computes, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return jax.tree.map(spoil, state)


def _filled(rows: Rows) -> Rows:
    """Zeros behind a batch's rows, so that one compiled step serves all batches."""
    return jax.tree.map(lambda a: np.pad(a, [(0, STACK_ROWS - len(a)), *[(0, 0)] * (a.ndim - 1)]), rows)


def host_tables_of(plan: Plan, of: EmbeddingLayout, optimizer: ops.RowOptimizer) -> dict[str, HostTable]:
    """Rows that the plan keeps in host memory, by planned stack."""
    key = nnx.Rngs(params=SEED).params()
    return {s.name: HostTable(s, optimizer, key) for s in planned_stacks(of) if plan.host_rows(plan_stack(s))}


def assert_close(found: Trace, expected: Trace, *, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Losses, logits, tables, slots, dense parameters and their moments agree as far as float32 sums can."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=rtol, atol=atol)
    np.testing.assert_allclose(np.stack(found.logits), np.stack(expected.logits), rtol=rtol, atol=atol)
    np.testing.assert_allclose(found.predicted, expected.predicted, rtol=rtol, atol=atol)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array, rtol=rtol, atol=atol, err_msg=name)


QUICK, LONG = 6, 50


@functools.cache
def alone(name, steps, **kwargs):
    return mesh_runs.on_one_device(OPTIMIZERS[name], steps, **kwargs)
