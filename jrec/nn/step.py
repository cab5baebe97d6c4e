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
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.mesh.communication import Communication
from jrec.mesh.route import AXIS
from jrec.nn.losses import SliceSums, binary_cross_entropy, in_slices, nonzero, over_devices
from jrec.nn.micro_batches import MicroBatches
from jrec.nn.module_state import Changed, arrays_of, check_independent, logits_of, pure_logits, put, replaced, shared
from jrec.nn.optimizer import Loss, SparseModel, SparseOptimizer
from jrec.nn.update import apply_gradients, step_contexts, step_stores
from jrec.tiers.store import Store, Stores, look_up

Activations = Mapping[str, jax.Array]
_NONE: Stores = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """The results of a step.

    Attributes:
      stores: The stores of the arguments after the step, by stack.
      loss: () float32, the whole batch's loss; NaN where rows did not fit into the embeddings' ``unique_capacities``.
      logits: What the model's ``logits`` returns for the device's part of the batch, before the step.
      gradient_norm: () float32, the norm of all gradients before they were clipped; None where nothing clips them.
    """

    stores: dict[str, Store]
    loss: jax.Array
    logits: PyTree[jax.Array]
    gradient_norm: jax.Array | None = None


def train_step(
    model: SparseModel, optimizer: SparseOptimizer, batch: Batch, *, loss: Loss = binary_cross_entropy
) -> tuple[jax.Array, jax.Array]:
    """One training step, in place on ``model`` and ``optimizer``: lookup, dense gradients, casted update of the rows.

    ``jrec.distribute`` compiles it so that tables and slots are updated without a copy; so does ``nnx.jit`` where it
    may overwrite the modules. Elsewhere every step copies the tables, which takes time that grows with their rows:

      >>> step = nnx.jit(train_step, donate_argnames=("model", "optimizer"))

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
    model: SparseModel,
    optimizer: SparseOptimizer,
    stores: Stores,
    batch: Batch,
    *,
    loss: Loss = binary_cross_entropy,
    communication: Communication | None = None,
    micro_batches: int = 1,
) -> StepOutputs:
    """One training step, in place on ``model`` and ``optimizer``, with ``stores`` for rows that the model lacks.

    Args:
      model: A ``SparseModel``.
      optimizer: The model's optimizer.
      stores: The rows that are not in the model, by stack.
      batch: A mini-batch, or a device's part of one, whose ids number the rows of ``stores``.
      loss: A function of logits and batch to a mean over the examples.
      communication: The other devices; the step is then inside ``shard_map``. None on a single device.
      micro_batches: How many slices of the examples the dense model runs forward and backward, one after another. Its
        activations then take the memory of one slice; rows are looked up, and stepped, once.

    Raises:
      ConfigError: If the slices would be of unequal size.
    """
    embeddings = model.embeddings
    contexts = step_contexts(embeddings, optimizer, communication)
    # Contexts hold the number of the step, which ``dense.update`` counts at the end: both are made before it.
    every = step_stores(embeddings, optimizer, stores, batch.bags)
    activations, residuals = look_up(every, batch.bags, contexts, embeddings.implementation)
    (value, logits), (dense_gradients, gradients) = _gradients(
        model, activations, batch, loss, communication, micro_batches
    )
    # All stores look up before the dense model runs, and update after it: their kernels share launches on a GPU.
    updated, norm = apply_gradients(
        model,
        optimizer,
        every,
        residuals,
        dense_gradients,
        gradients,
        contexts=contexts,
        communication=communication,
    )
    # Each device's value is its share of the loss, by its examples: the sum is the mean over the whole batch.
    if communication is not None:
        value = jax.lax.psum(value, AXIS)
    # The step is taken all the same, in place: NaN is how a jitted step says that gradients of some rows were lost.
    value = jnp.where(embeddings.rows_left_out(residuals) > 0, jnp.nan, value)
    stores = {name: updated[name] for name in stores}
    return StepOutputs(stores=stores, loss=value, logits=logits, gradient_norm=norm)


def accumulated_step(
    model: SparseModel, optimizer: SparseOptimizer, batches: Sequence[Batch], *, loss: Loss = binary_cross_entropy
) -> tuple[jax.Array, list[PyTree[jax.Array]]]:
    """One step on several micro-batches, in place: the step of one batch with all their examples.

    The dense model sees one micro-batch at a time, so that its activations take the memory of one. Dense parameters and
    rows take one step each, from the gradients of all.

    Args:
      model: A ``SparseModel`` that holds all of its rows.
      optimizer: The model's optimizer.
      batches: Micro-batches whose bags fit the model's layout.
      loss: A function of logits and batch to a mean over the examples; micro-batches count by theirs (``mask``).

    Returns:
      The loss of all examples, () float32, and what ``logits`` returned for each micro-batch.
    """
    if not batches:
        raise ValueError("there are no micro-batches; give one at least")
    embeddings, counts = model.embeddings, [jnp.sum(batch.mask) for batch in batches]
    total = nonzero(functools.reduce(jnp.add, counts))
    value, outputs, dense_gradients, activation_gradients = jnp.float32(0), [], None, []
    for batch, count in zip(batches, counts, strict=True):
        # A mean of means would weigh examples of short micro-batches more; by their shares the sum is the mean of all.
        share = count / total
        activations, residuals = optimizer.lookup(model, batch.bags)
        (own, logits), (dense, gradients) = _gradients(model, activations, batch, loss, None)
        own = jnp.where(embeddings.rows_left_out(residuals) > 0, jnp.nan, own)
        value, outputs = value + own * share, [*outputs, logits]
        dense = jax.tree.map(lambda leaf, share=share: leaf * share.astype(leaf.dtype), dense)
        dense_gradients = dense if dense_gradients is None else jax.tree.map(jnp.add, dense_gradients, dense)
        activation_gradients.append({name: array * share for name, array in gradients.items()})
    optimizer.update_accumulated(model, [batch.bags for batch in batches], dense_gradients, activation_gradients)
    return value, outputs


def predict_on(
    model: SparseModel,
    stores: Stores,
    batch: Batch,
    *,
    optimizer: SparseOptimizer | None = None,
    communication: Communication | None = None,
) -> jax.Array:
    """Logits, (examples,) float32, of the model in eval mode; it stays as it is, and so does all of its state.

    Devices that do not compute get zeros. Arguments as in ``train_step_on``; ``optimizer`` is needed where it is exact,
    since rows are then read with their slots.
    """
    embeddings = model.embeddings
    if optimizer is None or not optimizer.has_tail:
        every = embeddings.with_own(stores, bags=batch.bags)
        contexts = embeddings.contexts(communication=communication)
    else:
        every = step_stores(embeddings, optimizer, stores, batch.bags)
        contexts = step_contexts(embeddings, optimizer, communication)
    activations, _ = look_up(every, batch.bags, contexts, embeddings.implementation)
    graph, state = nnx.split(model)

    def logits(state: nnx.State, activations: Activations) -> jax.Array:
        # A copy: eval mode, and whatever ``logits`` counts or draws, must not reach the model that trains.
        working = nnx.merge(graph, state, copy=True)
        working.eval()
        return logits_of(working, batch, activations)

    work = logits if communication is None else communication.where_computed(logits)
    return work(state, activations)


def weight_and_examples(batch: Batch, communication: Communication | None) -> jax.Array:
    """(2,) float32: the sum of the examples' weights, and how many count; on a mesh of all devices' parts.

    One array, which a mesh adds up at once; of two calls in one program XLA keeps one.
    """
    own = jnp.stack([jnp.sum(batch.mask), jnp.sum(batch.mask != 0, dtype=batch.mask.dtype)])
    return own if communication is None else jax.lax.psum(own, AXIS)


def _gradients(
    model: SparseModel,
    activations: Activations,
    batch: Batch,
    loss: Loss,
    communication: Communication | None,
    micro_batches: int = 1,
) -> tuple[tuple[jax.Array, PyTree[jax.Array]], tuple[nnx.State, dict[str, jax.Array]]]:
    """Loss and logits, and the gradients of (``nnx.Param``, activations); on a mesh, of the device's part.

    What ``logits`` changes in the model is put there. Devices that do not compute get zeros.
    """
    params, logits = pure_logits(model, communication)
    total = device = None
    # Parts are weighed by their real examples. A single whole batch needs no weight, and keeps the loss's own bits.
    if communication is not None or micro_batches > 1:
        total = nonzero(weight_and_examples(batch, communication)[0])
    # A mesh of one device draws the random numbers of a device without a mesh.
    if communication is not None and jax.lax.axis_size(AXIS) > 1:
        device = jax.lax.axis_index(AXIS)

    def part(
        params: nnx.State, activations: Activations, changed: Changed, batch: Batch, sums: SliceSums | None = None
    ) -> tuple[jax.Array, tuple[PyTree[jax.Array], Changed]]:
        with in_slices(sums):
            outputs, changed = logits(params, changed, activations, batch, device)
            value = loss(outputs, batch)
        if (shape := jnp.shape(value)) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            # Here, since weighing by a device's or a slice's share would make a float of it, without a gradient.
            kind = jnp.result_type(value)
            raise TypeError(f"the loss is {kind}{list(shape)}; give a single float, such as a mean")
        return value if total is None else value * (jnp.sum(batch.mask) / total), (outputs, changed)

    def work(params: nnx.State, activations: Activations) -> PyTree:
        if micro_batches == 1:
            return jax.value_and_grad(part, argnums=(0, 1), has_aux=True)(params, activations, {}, batch)
        slices = MicroBatches(model.embeddings.layout, batch, activations, micro_batches)
        return _accumulated(part, params, slices, arrays_of(model))

    computed = work if communication is None else communication.where_computed(work)
    (value, (outputs, changed)), gradients = computed(params, activations)
    if communication is not None and total is not None:
        # Integers have no mean: they must follow from what all devices
        # have alike, or the devices' copies would drift apart.
        check_independent(changed, lambda own: logits(params, {}, *own)[1], (activations, batch, device))
        changed = shared(model, changed, communication, jnp.sum(batch.mask) / total)
    put(model, changed)
    return (value, outputs), gradients


def _accumulated(
    part: Callable[..., tuple[jax.Array, tuple[PyTree[jax.Array], Changed]]],
    params: nnx.State,
    slices: MicroBatches,
    arrays: Mapping[str, jax.Array],
) -> PyTree:
    """Loss, (logits, changed arrays) and gradients of the whole batch, from one slice after another.

    Args:
      part: A function of parameters, activations, changed arrays, batch and ``SliceSums`` to loss and (logits, changed
        arrays).
      params: The parameters.
      slices: The slices.
      arrays: The model's arrays by path; those that are changed go on from slice to slice.
    """
    one = jax.value_and_grad(part, argnums=(0, 1), has_aux=True)

    def asked(a_slice: PyTree) -> tuple[list[jax.Array], Changed]:
        """The slice's terms of the sums that the loss asks for, and what the slice changes."""
        activations, batch = slices.of(a_slice)
        collected = SliceSums(None)
        _, (_, changed) = part(params, activations, {}, batch, collected)
        return collected.asked, changed

    def step(
        carry: tuple[jax.Array, Changed, nnx.State], a_slice: PyTree
    ) -> tuple[tuple[jax.Array, Changed, nnx.State], tuple[PyTree[jax.Array], dict[str, jax.Array]]]:
        value, changed, dense = carry
        activations, batch = slices.of(a_slice)
        (own, (outputs, changed)), (own_dense, gradients) = one(
            replaced(params, changed), activations, changed, batch, SliceSums(sums)
        )
        return (value + own, changed, jax.tree.map(jnp.add, dense, own_dense)), (outputs, gradients)

    # A scan's carry has one structure throughout, so what a slice changes must be known before the first one runs.
    terms, changes = jax.eval_shape(asked, jax.tree.map(lambda array: array[0], slices.slices))
    sums: list[jax.Array] = []
    if terms:  # of the labels and masks as a rule, so that the compiler leaves the model out of this scan
        _, of_slices = jax.lax.scan(lambda carry, a_slice: (carry, asked(a_slice)[0]), None, slices.slices)
        sums = [over_devices(jnp.sum(each, axis=0)) for each in of_slices]
    changed = {name: arrays[name] for name in changes}
    start = (jnp.float32(0), changed, jax.tree.map(jnp.zeros_like, params))
    (value, changed, dense), (outputs, gradients) = jax.lax.scan(step, start, slices.slices)
    return (value, (slices.joined(outputs), changed)), (dense, slices.joined_bags(gradients))
