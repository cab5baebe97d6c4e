"""The second half of a step: from gradients to new dense parameters, rows and cores."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jrec.mesh.communication import Communication
from jrec.mesh.route import AXIS
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.types import Bags
from jrec.tiers.store import Context, Residuals, Store, Stores, Update, apply_updates, updates

if TYPE_CHECKING:
    from jrec.nn.embeddings import EmbeddingCollection
    from jrec.nn.optimizer import SparseModel, SparseOptimizer


def step_contexts(
    embeddings: EmbeddingCollection, optimizer: SparseOptimizer, communication: Communication | None = None
) -> dict[str, Context]:
    """What the stores know of the optimizer's next step, by stack."""
    return embeddings.contexts(
        optimizer=optimizer.of,
        cores=optimizer.cores_of,
        step=optimizer.step.astype(jnp.int32),
        rounding_key=optimizer.rounding_key(),
        communication=communication,
    )


def step_stores(
    embeddings: EmbeddingCollection, optimizer: SparseOptimizer, stores: Stores, bags: Mapping[str, Bags] | None
) -> dict[str, Store]:
    """The stores of all stacks with their slots, ``stores`` among them; ``bags`` are looked up, unless None."""
    slots = {stack: {name: slot[...] for name, slot in own.items()} for stack, own in optimizer.slots.items()}
    return embeddings.with_own(stores, slots, bags=bags)


def apply_gradients(
    model: SparseModel,
    optimizer: SparseOptimizer,
    stores: Stores,
    residuals: Mapping[str, Residuals],
    dense_gradients: PyTree,
    activation_gradients: Mapping[str, jax.Array],
    *,
    contexts: Mapping[str, Context],
    communication: Communication | None = None,
    gradient_scale: jax.Array | float | None = None,
) -> tuple[dict[str, Store], jax.Array | None]:
    """Steps dense parameters, rows and cores, in place on ``model`` and ``optimizer``.

    Args:
      model: A ``SparseModel``.
      optimizer: The model's ``SparseOptimizer``.
      stores: The stores of all stacks (``step_stores``).
      residuals: What the stores' lookups left, by stack.
      dense_gradients: The gradient of ``nnx.Param``; on a mesh, from the device's part of the batch.
      activation_gradients: (num_bags, dim) float32 by stack.
      contexts: The stores' contexts, by stack (``step_contexts``).
      communication: The other devices, or None.
      gradient_scale: A factor of all gradients; None for one.

    Returns:
      The stores after the step, and the norm of all gradients before they were clipped, () float32; None where nothing
      clips them.
    """
    pending, norm = updates(stores, residuals, optimizer.narrowed(activation_gradients), contexts), None
    scale = None if gradient_scale is None else jnp.asarray(gradient_scale, jnp.float32)
    limit = optimizer.max_global_norm
    # The norm of the whole batch's gradients decides, so dense gradients are summed over the devices before any row is
    # stepped; without a limit only after that.
    if limit is not None:
        dense_gradients = _of_all_devices(dense_gradients, communication)
        norm = _gradient_norm(dense_gradients, pending, communication)
        # The scale is one factor of all gradients, so it may be multiplied to the norm in place of each of them.
        norm = norm if scale is None else norm * jnp.abs(scale)
        # 1 where the norm is below the limit, without a division by a norm of zero.
        clip = limit / jnp.maximum(norm, limit)
        scale = clip if scale is None else scale * clip
    if scale is not None:
        dense_gradients = jax.tree.map(lambda gradient: gradient * scale.astype(gradient.dtype), dense_gradients)
    embeddings = model.embeddings
    updated = apply_updates(stores, pending, contexts, embeddings.implementation, gradient_scale=scale)
    for stack, of_stack in embeddings.put(updated).items():
        for name, slot in of_stack.items():
            optimizer.slots[stack][name][...] = slot
    if limit is None:
        dense_gradients = _of_all_devices(dense_gradients, communication)
    # Last: it counts the step, whose number row optimizers and rounding have read.
    optimizer.dense.update(model, dense_gradients)
    return updated, norm


def joined_bags(layout: EmbeddingLayout, bags: Sequence[Mapping[str, Bags]]) -> dict[str, Bags]:
    """The bags of several batches, one batch behind the other, without casts.

    Raises:
      ValueError: If some of them have weights and others not, or other stacks.
    """
    joined = {}
    for name in layout.stacks:
        of_stack = [batch[name] for batch in bags]
        if len({(one.weights is None, one.offsets is None) for one in of_stack}) > 1:
            raise ValueError(f"the bags of stack {name} are not all of one form: padded or ragged, weighted or not")
        ids = jnp.concatenate([one.ids for one in of_stack])
        weights = None
        if of_stack[0].weights is not None:
            weights = jnp.concatenate([one.weights for one in of_stack if one.weights is not None])
        if of_stack[0].offsets is None:
            joined[name] = Bags(ids=ids, weights=weights)
        else:
            joined[name] = _joined_ragged(of_stack, ids, weights)
    return joined


def _joined_ragged(of_stack: Sequence[Bags], ids: jax.Array, weights: jax.Array | None) -> Bags:
    """Lookups moved together: what lies past a batch's last bag is padding."""
    begins, places, offsets = jnp.int32(0), [], [jnp.zeros(1, jnp.int32)]
    for one in of_stack:
        assert one.offsets is not None
        number = jnp.arange(one.capacity, dtype=jnp.int32)
        places.append(jnp.where(number < one.offsets[-1], begins + number, ids.size))
        offsets.append(begins + one.offsets[1:])
        begins = begins + one.offsets[-1]
    place = jnp.concatenate(places)
    moved = jnp.full(ids.shape, -1, ids.dtype).at[place].set(ids, mode="drop")
    if weights is not None:
        weights = jnp.zeros(weights.shape, weights.dtype).at[place].set(weights, mode="drop")
    return Bags(ids=moved, offsets=jnp.concatenate(offsets), weights=weights)


def _of_all_devices(dense_gradients: PyTree, communication: Communication | None) -> PyTree:
    return dense_gradients if communication is None else communication.summed(dense_gradients)


def _gradient_norm(
    dense_gradients: PyTree, pending: Mapping[str, Update[Store, Residuals]], communication: Communication | None
) -> jax.Array:
    """The Euclidean norm of all gradients together, () float32, the same on all devices.

    Args:
      dense_gradients: The gradient of the whole batch.
      pending: The rows' updates, by stack.
      communication: The other devices, or None.
    """
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(dense_gradients)]
    total = functools.reduce(jnp.add, squares, jnp.float32(0))
    # Dense gradients are equal on all devices by now, rows' squares are each
    # device's share: one sum over devices takes both, if the former count once.
    total = total if communication is None else communication.once(total)
    total = functools.reduce(jnp.add, [update.squares() for update in pending.values()], total)
    return jnp.sqrt(total if communication is None else jax.lax.psum(total, AXIS))
