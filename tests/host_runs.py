"""A small model with host tables, its batches, and its run on the device: what tests of the pipeline share."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jrec import ops
from jrec.batch import Batch
from jrec.host import HostTable
from jrec.host.pipeline import HostPipeline
from jrec.host.pipeline_batch import WholeBatches
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.types import Bags
from jrec.run.feeds.host import unique_rows
from jrec.run.feeds.in_place import HostCasts, HostPooling
from jrec.run.step import CompiledRun, State, StepBatch, compile_run

EXAMPLES, STEPS, SEED = 16, 10, 3
PROBE = 99  # the batch to evaluate on
TIMEOUT = 60.0  # seconds; what takes longer hangs

TABLES = (("site", 40, "float32"), ("user", 5, "float32"), ("item", 300, "bfloat16"))
FEATURES = (
    FeatureConfig(name="site", table="site"),
    FeatureConfig(name="user", table="user", max_length=3, pooling="mean"),
    FeatureConfig(name="item", table="item", max_length=12),
)


def within[T](function: Callable[[], T], seconds: float = TIMEOUT) -> T:
    """What ``function`` returns or raises, in a thread; a failure where it hangs."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((True, function()))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"hangs: not done after {seconds} seconds"
    if not outcome[0]:
        raise outcome[1]
    return outcome[1]


def pipeline_threads() -> list[str]:
    """Names of the threads of pipelines that are alive; those of kernels and lifelines live as long as the process."""
    others = ("native", "lifeline")
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("jrec-")]
    return [name for name in names if not any(other in name for other in others)]


def layout(tier: Any) -> EmbeddingLayout:
    """Two stacks, of two dtypes."""
    tables = [TableConfig(name=name, rows=rows, dim=8, dtype=dtype, tier=tier) for name, rows, dtype in TABLES]
    return EmbeddingLayout.build(tables, FEATURES)


def batches(of: EmbeddingLayout, steps: int = STEPS) -> Iterator[tuple[Batch, int]]:
    """Batches of ids so skewed that neighbours share most rows, and how many came before the next one."""
    for number in range(steps):
        yield make_batch(of, number), number + 1


@functools.cache
def make_batch(of: EmbeddingLayout, number: int) -> Batch:
    """One of them."""
    rng = np.random.default_rng(number)
    return Batch(
        dense=rng.normal(size=(EXAMPLES, 3)).astype(np.float32),
        labels=rng.integers(0, 2, EXAMPLES).astype(np.float32),
        mask=np.ones(EXAMPLES, np.float32),
        bags={name: _bags(stack, rng) for name, stack in of.stacks.items()},
    )


def _bags(stack: Any, rng: np.random.Generator) -> Bags:
    ids, weights, offsets = [], [], [0]
    for feature in stack.features:
        for _ in range(EXAMPLES):
            count = int(rng.integers(0, feature.config.max_length + 1))
            ids += list(feature.base + np.minimum(rng.zipf(1.15, count) - 1, feature.rows - 1))
            weights += [1 / max(1, count) if feature.config.pooling == "mean" else 1.0] * count
            offsets.append(len(ids))
    space = stack.capacity(EXAMPLES) - len(ids)
    return Bags(
        ids=np.array(ids + [0] * space, np.int32),
        offsets=np.array(offsets, np.int32),
        weights=np.array(weights + [0.0] * space, np.float32) if stack.weighted else None,
    )


def optimizer(name: str) -> ops.RowOptimizer:
    """With rates at which every step changes every touched row."""
    return {"adam": ops.Adam, "rowwise_adagrad": ops.RowWiseAdagrad, "sgd": ops.SGD}[name](learning_rate=0.1)


@functools.cache
def _compiled(tier: str, rows: str) -> tuple[dict[str, Any], CompiledRun]:
    model = DLRM(DLRMConfig(num_dense=3, bottom_mlp=(8,), top_mlp=(8, 1)), layout(tier), rngs=nnx.Rngs(params=SEED))
    sparse = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=optimizer(rows), rounding_seed=SEED)
    state, run = compile_run(model, sparse)
    return jax.tree.map(np.asarray, state), run


def new_run(tier: str, rows: str = "adam") -> tuple[State, CompiledRun]:
    """The initial state, whose arrays are the caller's own, and functions compiled once."""
    state, run = _compiled(tier, rows)
    return jax.tree.map(jax.numpy.array, state), run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a run is after a step: its loss, logits of another batch, and the bits of every row, slot and parameter."""

    loss: float | None
    logits: bytes
    tables: dict[str, bytes]
    dense: dict[str, bytes]


@functools.cache
def device_snapshots(rows: str = "adam") -> list[Snapshot]:
    """The run on the device before the first step and after each."""
    of = layout("sharded")
    state, run = new_run("sharded", rows)
    found = []
    for number in range(-1, STEPS):
        loss = None
        if number >= 0:
            state, value, _ = run.step(state, make_batch(of, number))
            loss = float(value)
        model, sparse = run.merge(state)
        tables = {}
        for name, array in model.embeddings.arrays().items():
            slots = {slot: np.asarray(variable[...]) for slot, variable in sparse.slots[name].items()}
            tables |= row_bits(name, np.asarray(array), slots)
        logits = np.asarray(run.predict(state, make_batch(of, PROBE))).tobytes()
        found.append(Snapshot(loss=loss, logits=logits, tables=tables, dense=dense_bits(state)))
    return found


class HostRun:
    """A run on host tables that can be looked at between its steps."""

    def __init__(self, rows: str = "adam", *, threads: int = 1):
        self.layout = layout("host")
        self.state, self.run = new_run("host", rows)
        key = nnx.Rngs(params=SEED).params()
        self.tables = {s.name: HostTable(s, optimizer(rows), key, threads=threads) for s in self.layout.members}
        self.pooling = HostPooling(self.tables)

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """Logits with rows read from the host."""
        prepared = WholeBatches(self.layout.stacks, lambda tree: tree).prepare(batch)
        rows = unique_rows(prepared.rows, self.tables)
        return self.run.predict_on(state, {}, rows, StepBatch(batch=prepared.batch))

    def pipeline(self, source: Any = None, **options: Any) -> HostPipeline:
        """Over the run's batches."""
        options = {"queue": 3, **options}
        return HostPipeline(batches(self.layout) if source is None else source, self.layout, self.tables, **options)

    def step(self, pipeline: HostPipeline) -> float | None:
        """Takes a step; its loss, or None if there are no more batches."""
        if (ready := pipeline.get()) is None:
            return None
        given = StepBatch(batch=ready.batch)
        self.state, _, rows, seen = self.run.step_on(self.state, {}, ready.tables, given)
        pipeline.put_back(ready, rows)
        return float(seen.loss)

    def step_in_place(self, batch: Batch) -> float:
        """Takes a step on a batch whose rows the host pools and updates; its loss."""
        batch = HostCasts(self.layout.members)(batch)
        prepared = self.pooling.pooled(batch)
        self.state, _, host, seen = self.run.step_on(self.state, {}, {}, prepared)
        self.pooling.update(batch, host)
        return float(seen.loss)

    def snapshot(self, loss: float | None) -> Snapshot:
        """Of a flushed run; stacks by their names on the device."""
        tables = {}
        for name, table in self.tables.items():
            values, slots = table.fetch(np.arange(table.rows, dtype=np.int32))
            tables |= row_bits(name.removeprefix("host_"), values, slots)
        logits = np.asarray(self.predict(self.state, make_batch(self.layout, PROBE))).tobytes()
        return Snapshot(loss=loss, logits=logits, tables=tables, dense=dense_bits(self.state))


def row_bits(name: str, values: np.ndarray, slots: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: values.tobytes(), **{f"{name}.{slot}": array.tobytes() for slot, array in slots.items()}}


def dense_bits(state: State) -> dict[str, bytes]:
    """Of all that is on the device and no row."""
    leaves = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state))
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves if "stacks" not in path and "slots" not in path}
