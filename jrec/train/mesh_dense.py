"""The dense model on a mesh: on every device or, where a plan gives the tables to some, on the others alone.

Devices that only keep tables skip its forward and backward pass, and its gradients are summed over the others. So their
copies of dense parameters stay behind: nothing may read these. What leaves the mesh goes through ``settled``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jrec.batch import Batch
from jrec.mesh.route import AXIS
from jrec.mesh.send import only_on
from jrec.nn.optimizer import Loss

Computes = tuple[bool, ...] | None
"""Which devices of the mesh have examples, as in ``Plan``; None for all."""
Activations = Mapping[str, jax.Array]


def predicted(model: Any, activations: Activations, batch: Batch, computes: Computes) -> jax.Array:
    """The logits of a device's part, (examples,); zeros on devices that do not compute. Inside ``shard_map``."""
    graph, state = nnx.split(model)

    def logits(state: Any, activations: Activations) -> jax.Array:
        return nnx.merge(graph, state).logits(batch.dense, activations, batch.bags)

    return _where(computes, logits)(state, activations)


def gradients_of(
    model: Any, activations: Activations, batch: Batch, loss: Loss, weight: jax.Array, computes: Computes
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, dict[str, jax.Array]]]:
    """Loss and gradients of a device's part; zeros on devices that do not compute. Inside ``shard_map``.

    Args:
      model: a ``SparseModel``, whose ``logits`` must not change it.
      activations: of the part's bags.
      batch: the part.
      loss: of logits and batch.
      weight: () float32, of this part's loss in that of the whole batch.
      computes: which devices do it.

    Returns:
      (weighted loss, logits), and the gradients of (``nnx.Param``, activations).
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def objective(params: Any, activations: Activations) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params, rest).logits(batch.dense, activations, batch.bags)
        return loss(logits, batch) * weight, logits

    return _where(computes, jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(params, activations)


def _where(computes: Computes, work: Callable[..., Any]) -> Callable[..., Any]:
    return work if computes is None else lambda *arguments: only_on(computes, work, *arguments)


def summed(tree: Any, computes: Computes) -> Any:
    """Sums over the devices that compute; the others keep what they gave. Inside ``shard_map``."""
    if computes is None:
        return jax.lax.psum(tree, AXIS)
    groups = [np.flatnonzero(computes).tolist(), *([d] for d, computing in enumerate(computes) if not computing)]
    return jax.lax.psum(tree, AXIS, axis_index_groups=groups)


def of_examples(values: jax.Array, computes: Computes) -> jax.Array:
    """(batch,) on every device, from each device's (examples,), in the order of the devices. Inside ``shard_map``."""
    found = jax.lax.all_gather(values, AXIS, tiled=True)
    if computes is None:
        return found
    return found.reshape(len(computes), -1)[np.flatnonzero(computes)].reshape(-1)


def settled(mesh: Mesh, computes: tuple[bool, ...]) -> Callable[[Any], Any]:
    """A jitted function from a state to the one that the devices that compute have, on all devices."""
    first, everywhere = computes.index(True), PartitionSpec()

    def copied(state: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS)[first], state)

    return jax.jit(jax.shard_map(copied, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
