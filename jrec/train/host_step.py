"""Steps and predictions on tables whose rows come from host memory, batch by batch.

A batch's unique rows stand in for the whole stack: ids and cast number them, and lookup, casted update and everything
between are the very functions of a stack that lives on the device. So both compute the same bits. Where all rows of a
batch stay on the device (``jrec.host.resident``), those stand in as they are.
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
from jrec.ops.storage import pad, strip
from jrec.ops.types import Cast


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
    key_of = _rounding_keys(model, optimizer, rows)
    with _standing_in(model, _widened(model, rows), optimizer):
        loss, logits = train_step(model, optimizer, _on_rows(batch, rows))
        updated = {name: _taken(model, optimizer, name) for name in rows}
    dims = {name: model.embeddings.layout.stacks[name].dim for name in rows}
    for name, of in updated.items():
        of = jax.tree.map(lambda array, dim=dims[name]: strip(array, dim) if array.ndim == 2 else array, of)
        addresses = _cast(batch, name).rows[: of.values.shape[0]]
        values = _rounded(of.values, rows[name].values.dtype, key_of[name], addresses)
        updated[name] = dataclasses.replace(of, values=values)
    return updated, loss, logits


def train_step_on_resident(
    model: Any,
    optimizer: SparseOptimizer,
    rows: Mapping[str, Rows],
    addresses: Mapping[str, jax.Array],
    batch: Batch,
) -> tuple[dict[str, Rows], jax.Array, jax.Array]:
    """``train_step_on_rows`` for batches that read resident rows alone: those are the stacks, updated in place.

    Args:
      model: a ``SparseModel``.
      optimizer: made for this model.
      rows: by host stack, (n, dim or more) float32 and slots, as ``jrec.host.resident`` keeps them. Donated to a jitted
        function around this, they change without a copy.
      addresses: by stack, (n,) int32: which rows of the host stack they are.
      batch: whose ids and casts number ``rows``; stacks of 16 bits need the casts.

    Returns:
      As of ``train_step_on_rows``, with all of ``rows``: those that the batch did not read keep their bits.
    """
    key_of = _rounding_keys(model, optimizer, rows)
    with _standing_in(model, rows, optimizer):
        loss, logits = train_step(model, optimizer, batch)
        updated = {name: _taken(model, optimizer, name) for name in rows}
    for name, of in updated.items():
        dtype = jnp.dtype(model.embeddings.layout.stacks[name].dtype)
        if dtype != jnp.float32:
            read = _cast(batch, name).rows
            of_stack = addresses[name].at[read].get(mode="clip")
            values = _rounded(of.values.at[read].get(mode="clip"), dtype, key_of[name], of_stack)
            values = of.values.at[read].set(values.astype(jnp.float32), mode="drop")
            updated[name] = dataclasses.replace(of, values=values)
    return updated, loss, logits


def predict_on_rows(model: Any, rows: Mapping[str, Rows], batch: Batch) -> jax.Array:
    """Logits, (batch,) float32, with the rows of host stacks given as to ``train_step_on_rows``, but without slots."""
    with _standing_in(model, _widened(model, rows), None):
        return model(batch)


def _widened(model: Any, rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """Rows as the model stores its own stacks, but float32, whatever the table's dtype.

    Widening is exact, and rounding the result once, by the rows' own numbers, is what an update of 16-bit rows does.
    """
    widen = pad if model.embeddings.pad_rows else (lambda array: array)
    return {
        name: Rows(
            values=widen(of.values.astype(jnp.float32)),
            slots={slot: widen(array) if array.ndim == 2 else array for slot, array in of.slots.items()},
        )
        for name, of in rows.items()
    }


@contextlib.contextmanager
def _standing_in(model: Any, rows: Mapping[str, Rows], optimizer: SparseOptimizer | None) -> Iterator[None]:
    """Gives the model's collection, and the optimizer, the rows as stacks, for as long as this lasts."""
    embeddings = model.embeddings
    for name, of in rows.items():
        embeddings.stacks[name] = Table(of.values)
        if optimizer is not None:
            optimizer.slots[name] = nnx.Dict({slot: RowSlot(array) for slot, array in of.slots.items()})
    try:
        yield
    finally:
        for name in rows:
            del embeddings.stacks[name]
            if optimizer is not None:
                del optimizer.slots[name]


def _taken(model: Any, optimizer: SparseOptimizer, name: str) -> Rows:
    """What stood in for a stack, as the step left it."""
    slots = {slot: variable[...] for slot, variable in optimizer.slots[name].items()}
    return Rows(values=model.embeddings.stacks[name][...], slots=slots)


def _rounding_keys(model: Any, optimizer: SparseOptimizer, rows: Mapping[str, Rows]) -> dict[str, jax.Array | None]:
    """By host stack the key of this step, as ``apply_gradients`` derives it where all stacks are on the device."""
    key = optimizer.rounding_key()
    names = sorted([*model.embeddings.stacks, *rows])
    return {name: None if key is None else rounding.derived_key(key, names.index(name)) for name in rows}


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
