"""Steps and predictions on tables whose rows come from host memory, batch by batch.

A batch's unique rows stand in for the whole stack: ids and cast number them, and lookup, casted update and everything
between are the very functions of a stack that lives on the device. So both compute the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.batch import Batch
from jrec.host.ring import Rows
from jrec.nn import SparseOptimizer, train_step
from jrec.nn.embeddings import Table
from jrec.nn.optimizer import RowSlot
from jrec.ops import rounding
from jrec.ops.types import Cast
from jrec.pallas.storage import pad, strip


def train_step_on_rows(
    model: Any, optimizer: SparseOptimizer, rows: Mapping[str, Rows], batch: Batch
) -> tuple[dict[str, Rows], jax.Array, jax.Array]:
    """``train_step``, in place on model and optimizer, with the rows of host stacks given and returned.

    Args:
      model: a ``SparseModel``.
      optimizer: made for this model.
      rows: by host stack, (capacity, dim) and slots: the batch's unique rows, for which there is room.
      batch: whose ids of host stacks number ``rows``, with casts that name rows of the stack.

    Returns:
      The rows after the step, the loss, () float32, and the logits before the step, (batch,) float32.
    """
    key = optimizer.rounding_key()
    names = sorted([*model.embeddings.stacks, *rows])
    with _resident(model, rows, optimizer):
        loss, logits = train_step(model, optimizer, _on_rows(batch, rows))
        updated = {name: _taken(model, optimizer, name) for name in rows}
    for name, of in updated.items():
        of_key = None if key is None else rounding.derived_key(key, names.index(name))  # as ``apply_gradients`` does
        addresses = _cast(batch, name).rows[: of.values.shape[0]]
        values = _rounded(of.values, rows[name].values.dtype, of_key, addresses)
        updated[name] = dataclasses.replace(of, values=values)
    return updated, loss, logits


def predict_on_rows(model: Any, rows: Mapping[str, Rows], batch: Batch) -> jax.Array:
    """Logits, (batch,) float32, with the rows of host stacks given as to ``train_step_on_rows``, but without slots."""
    with _resident(model, rows, None):
        return model(batch)


@contextlib.contextmanager
def _resident(model: Any, rows: Mapping[str, Rows], optimizer: SparseOptimizer | None) -> Iterator[None]:
    """Gives the model's collection, and the optimizer, the rows as stacks, for as long as this lasts.

    They are float32 there, whatever the table's dtype: widening is exact, and rounding the result once, by the rows'
    own numbers, is what an update of 16-bit rows does.
    """
    embeddings = model.embeddings
    widen = pad if embeddings.pad_rows else (lambda array: array)
    for name, of in rows.items():
        embeddings.stacks[name] = Table(widen(of.values.astype(jnp.float32)))
        if optimizer is not None:
            slots = {slot: RowSlot(widen(a) if a.ndim == 2 else a) for slot, a in of.slots.items()}
            optimizer.slots[name] = nnx.Dict(slots)
    try:
        yield
    finally:
        for name in rows:
            del embeddings.stacks[name]
            if optimizer is not None:
                del optimizer.slots[name]


def _taken(model: Any, optimizer: SparseOptimizer, name: str) -> Rows:
    """What ``_resident`` gave, as the step left it."""
    dim = model.embeddings.dims[name]
    slots = {slot: variable[...] for slot, variable in optimizer.slots[name].items()}
    return Rows(
        values=strip(model.embeddings.stacks[name][...], dim),
        slots={slot: strip(array, dim) if array.ndim == 2 else array for slot, array in slots.items()},
    )


def _on_rows(batch: Batch, rows: Mapping[str, Rows]) -> Batch:
    """The batch with casts that number ``rows``, as its ids do."""
    bags = dict(batch.bags)
    for name, of in rows.items():
        cast, capacity = _cast(batch, name), of.values.shape[0]
        numbers = jnp.arange(cast.rows.shape[0], dtype=jnp.int32)
        cast = dataclasses.replace(cast, rows=jnp.where(numbers < cast.num_unique, numbers, jnp.int32(capacity)))
        bags[name] = dataclasses.replace(bags[name], cast=cast)
    return dataclasses.replace(batch, bags=bags)


def _cast(batch: Batch, name: str) -> Cast:
    cast = batch.bags[name].cast
    if cast is None:
        raise ValueError(f"bags of host stack {name} have no cast; jrec.host.HostPipeline gives them one")
    return cast


def _rounded(values: jax.Array, dtype: Any, key: jax.Array | None, addresses: jax.Array) -> jax.Array:
    if key is None or dtype == jnp.float32:
        return values.astype(dtype)
    return rounding.stochastic_round(values, dtype, key, addresses)
