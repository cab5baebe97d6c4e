"""One step and one prediction of a model, wherever its rows live: on one device, on a mesh, in host memory, in cores.

A stack's rows are a store (``jrec.tiers``), which looks them up and updates them where they are. The model updates its
own stores; all other stores are arguments of ``train_step_on``, which returns them updated.

On a mesh every device looks up, and learns from, its part of the batch. The loss is the whole batch's: each part counts
by its examples, so that the gradients' sums over the devices are the gradients of one device with the whole batch.
Dense parameters, tensor-train cores and their caches are equal on all devices and stay so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.batch import Batch
from jrec.mesh.communication import Communication
from jrec.mesh.route import Route
from jrec.nn.optimizer import Loss, SparseOptimizer, binary_cross_entropy
from jrec.tiers.store import Stores, Update, apply_updates, look_up, updates

Activations = Mapping[str, jax.Array]
_NONE: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """The results of a step.

    Attributes:
      stores: The stores of the arguments after the step, by stack.
      loss: () float32, the whole batch's loss; NaN where rows did not fit into the embeddings' ``unique_capacities``.
      logits: What the model's ``logits`` returns for the device's part of the batch, before the step.
      gradient_norm: () float32, the norm of all gradients before they were clipped; None where nothing clips them.
    """

    stores: dict[str, Any]
    loss: jax.Array
    logits: Any
    gradient_norm: jax.Array | None = None


def train_step(
    model: Any, optimizer: SparseOptimizer, batch: Batch, *, loss: Loss = binary_cross_entropy
) -> tuple[jax.Array, jax.Array]:
    """One training step, in place on ``model`` and ``optimizer``: lookup, dense gradients, casted update of the rows.

    Run it under ``nnx.jit``, or on a split state under ``jax.jit`` with donation (``jrec.train``), where tables and
    slots are updated without a copy.

    Args:
      model: A ``SparseModel`` that holds all of its rows, as ``DLRM`` on one device.
      optimizer: The model's optimizer.
      batch: A mini-batch whose bags fit the model's layout.
      loss: A function of logits (batch,) and batch to a scalar.

    Returns:
      The loss, () float32, and the logits before the step, (batch,) float32. The loss is NaN where rows of the batch
      did not fit into the ``unique_capacities`` of the embeddings: their gradients are lost.
    """
    outputs = train_step_on(model, optimizer, {}, batch, loss=loss)
    return outputs.loss, outputs.logits


def train_step_on(
    model: Any,
    optimizer: SparseOptimizer,
    stores: Stores,
    batch: Batch,
    *,
    routes: Mapping[str, Route] = _NONE,
    loss: Loss = binary_cross_entropy,
    communication: Communication | None = None,
) -> StepOutputs:
    """One training step, in place on ``model`` and ``optimizer``, with ``stores`` for rows that the model lacks.

    Args:
      model: A ``SparseModel``.
      optimizer: The model's optimizer.
      stores: The rows that are not in the model, by stack.
      batch: A mini-batch, or a device's part of one, whose ids number the rows of ``stores``.
      routes: The routes, by stack of ``stores`` that needs one.
      loss: A function of logits and batch to a mean over the examples.
      communication: The other devices; the step is then inside ``shard_map``. None on a single device.
    """
    embeddings = model.embeddings
    contexts = embeddings.contexts(
        optimizer=optimizer.of,
        cores=optimizer.cores_of,
        step=optimizer.step.astype(jnp.int32),
        rounding_key=optimizer.rounding_key(),
        communication=communication,
    )
    slots = {stack: {name: slot[...] for name, slot in own.items()} for stack, own in optimizer.slots.items()}
    every = embeddings.with_own(stores, slots, bags=batch.bags)
    activations, residuals = look_up(every, batch.bags, routes, contexts, embeddings.implementation)
    (value, logits), (dense_gradients, gradients) = _gradients(model, activations, batch, loss, communication)
    pending, scale, norm = updates(every, residuals, gradients, routes, contexts), None, None
    if (limit := optimizer.max_global_norm) is not None:
        dense_gradients = _of_all_devices(dense_gradients, communication)
        norm = _gradient_norm(dense_gradients, pending, communication)
        scale = limit / jnp.maximum(norm, limit)
        dense_gradients = jax.tree.map(lambda gradient: gradient * scale.astype(gradient.dtype), dense_gradients)
    updated = apply_updates(every, pending, contexts, embeddings.implementation, gradient_scale=scale)
    for stack, of_stack in embeddings.put(updated).items():
        for name, slot in of_stack.items():
            optimizer.slots[stack][name][...] = slot
    if communication is not None:
        value = jax.lax.psum(value, communication.axis)
    if scale is None:
        dense_gradients = _of_all_devices(dense_gradients, communication)
    optimizer.dense.update(model, dense_gradients)
    value = jnp.where(embeddings.rows_left_out(residuals) > 0, jnp.nan, value)
    stores = {name: updated[name] for name in stores}
    return StepOutputs(stores=stores, loss=value, logits=logits, gradient_norm=norm)


def _of_all_devices(dense_gradients: Any, communication: Communication | None) -> Any:
    return dense_gradients if communication is None else communication.summed(dense_gradients)


def _gradient_norm(
    dense_gradients: Any, pending: Mapping[str, Update[Any]], communication: Communication | None
) -> jax.Array:
    """The Euclidean norm of all gradients together, () float32, the same on all devices.

    Args:
      dense_gradients: The whole batch's.
      pending: By stack.
      communication: The other devices, or None.
    """
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(dense_gradients)]
    total = functools.reduce(jnp.add, squares, jnp.float32(0))
    total = total if communication is None else communication.once(total)
    total = functools.reduce(jnp.add, [update.squares() for update in pending.values()], total)
    return jnp.sqrt(total if communication is None else jax.lax.psum(total, communication.axis))


def predict_on(
    model: Any,
    stores: Stores,
    batch: Batch,
    *,
    routes: Mapping[str, Route] = _NONE,
    communication: Communication | None = None,
) -> jax.Array:
    """Logits, (examples,) float32; zeros on devices that do not compute. Arguments as in ``train_step_on``."""
    embeddings = model.embeddings
    every = embeddings.with_own(stores, bags=batch.bags)
    contexts = embeddings.contexts(communication=communication)
    activations, _ = look_up(every, batch.bags, routes, contexts, embeddings.implementation)
    graph, state = nnx.split(model)

    def logits(state: Any, activations: Activations) -> jax.Array:
        return nnx.merge(graph, state).logits(batch.dense, activations, batch.bags)

    work = logits if communication is None else communication.where_computed(logits)
    return work(state, activations)


def _gradients(
    model: Any, activations: Activations, batch: Batch, loss: Loss, communication: Communication | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, dict[str, jax.Array]]]:
    """Loss and logits, and the gradients of (``nnx.Param``, activations); on a mesh, of the device's part.

    On a mesh ``logits`` must not change the model, and devices that do not compute get zeros.
    """
    if communication is None:

        def whole(model: Any, activations: Activations) -> tuple[jax.Array, jax.Array]:
            logits = model.logits(batch.dense, activations, batch.bags)
            return loss(logits, batch), logits

        arguments = (nnx.DiffState(0, nnx.Param), 1)
        return nnx.value_and_grad(whole, argnums=arguments, has_aux=True)(model, activations)
    real = jnp.sum(batch.mask)
    weight = real / jnp.maximum(jax.lax.psum(real, communication.axis), 1)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def part(params: Any, activations: Activations) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params, rest).logits(batch.dense, activations, batch.bags)
        return loss(logits, batch) * weight, logits

    work = jax.value_and_grad(part, argnums=(0, 1), has_aux=True)
    return communication.where_computed(work)(params, activations)
