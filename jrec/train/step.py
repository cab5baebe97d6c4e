"""The compiled functions of a training run: one step on donated state, and prediction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jrec.batch import Batch
from jrec.host.ring import Rows
from jrec.nn import SparseOptimizer, train_step
from jrec.train.host_step import predict_on_rows, train_step_on_resident, train_step_on_rows

State = Any  # an nnx.State of (model, optimizer): every array of the run
HostRows = Mapping[str, Rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """A model and its optimizer, split into a state and jitted functions of it.

    Attributes:
      step: ``state, batch -> state, loss, logits``. The old state is donated: tables and slots change in place.
      predict: ``state, batch -> logits``, (batch,) float32.
      step_on_rows: ``state, rows, batch -> state, rows, loss, logits``, for models with host stacks, whose rows of this
        batch are given by stack. State and rows are donated.
      step_on_resident: ``state, rows, addresses, batch -> state, rows, loss, logits``, for batches that read rows alone
        that stay on the device (``jrec.host.resident``). State and rows are donated: they change in place.
      predict_on_rows: ``state, rows, batch -> logits``.
      merge: the (model, optimizer) modules over a state.
    """

    step: Callable[[State, Batch], tuple[State, jax.Array, jax.Array]]
    predict: Callable[[State, Batch], jax.Array]
    step_on_rows: Callable[[State, HostRows, Batch], tuple[State, HostRows, jax.Array, jax.Array]]
    step_on_resident: Callable[
        [State, HostRows, Mapping[str, jax.Array], Batch], tuple[State, HostRows, jax.Array, jax.Array]
    ]
    predict_on_rows: Callable[[State, HostRows, Batch], jax.Array]
    merge: Callable[[State], tuple[Any, SparseOptimizer]]


def compile_run(model: Any, optimizer: SparseOptimizer) -> tuple[State, CompiledRun]:
    """Splits modules into the initial state and its functions.

    Example:
      >>> state, run = compile_run(model, optimizer)
      >>> state, loss, logits = run.step(state, batch)
    """
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: Batch) -> tuple[State, jax.Array, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, logits = train_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss, logits

    @jax.jit
    def predict(state: State, batch: Batch) -> jax.Array:
        model, _ = nnx.merge(graph, state)
        return model(batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_on_rows(state: State, rows: HostRows, batch: Batch) -> tuple[State, HostRows, jax.Array, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        rows, loss, logits = train_step_on_rows(model, optimizer, rows, batch)
        return nnx.state((model, optimizer)), rows, loss, logits

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_on_resident(
        state: State, rows: HostRows, addresses: Mapping[str, jax.Array], batch: Batch
    ) -> tuple[State, HostRows, jax.Array, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        rows, loss, logits = train_step_on_resident(model, optimizer, rows, addresses, batch)
        return nnx.state((model, optimizer)), rows, loss, logits

    @jax.jit
    def on_rows(state: State, rows: HostRows, batch: Batch) -> jax.Array:
        model, _ = nnx.merge(graph, state)
        return predict_on_rows(model, rows, batch)

    return state, CompiledRun(
        step=step,
        predict=predict,
        step_on_rows=step_on_rows,
        step_on_resident=step_on_resident,
        predict_on_rows=on_rows,
        merge=lambda state: nnx.merge(graph, state),
    )
