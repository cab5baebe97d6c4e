"""One step and one prediction of a model on a mesh: what a device does inside ``shard_map``.

Every device looks up, and learns from, its part of the batch. The loss is that of the whole batch: each part counts by
its examples, so that the gradients' sums over the devices are the gradients of one device that saw them all. Dense
parameters, tensor-train cores and their caches are equal on all devices and stay so (``jrec.train.mesh_tt``); rows of
planned tables are stepped where they live (``jrec.mesh``). Rows in host memory, of whole tables or of those
that a plan keeps there in part, come once for all devices, each device getting its share from the host; all of them
take the same step, and one of them returns the rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jrec.host.ring import Rows
from jrec.mesh.allreduce import Reduce, update_shared
from jrec.mesh.exchange import Exchange, Kind
from jrec.mesh.retrieve import retrieve
from jrec.mesh.route import AXIS, MeshRows, local_view
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions
from jrec.mesh.update import update
from jrec.nn import SparseOptimizer, binary_cross_entropy
from jrec.nn.optimizer import Loss
from jrec.ops import rounding
from jrec.ops.lookup import Residuals, lookup
from jrec.ops.row_update import casted_gather_reduce
from jrec.train.mesh_arrays import MeshBatch
from jrec.train.mesh_dense import Computes, gradients_of, of_examples, predicted, summed
from jrec.train.mesh_plan import plan_stack
from jrec.train.mesh_tt import step_tt

State = Any  # an nnx.State of (model, optimizer): equal on all devices
StackRows = Mapping[str, MeshRows]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What the training loop reads of a step, equal on all devices: the examples of all parts, device by device.

    Attributes:
      loss: () float32, of the whole batch.
      logits, labels, mask: (batch,) float32.
      host: the batch's rows from host memory, or all resident rows, after the step, (K, dim) and slots, by stack.
      needs: (stacks, kinds) int32, the greatest of the batch's ``needs``; None where it has none.
    """

    loss: jax.Array
    logits: jax.Array
    labels: jax.Array
    mask: jax.Array
    host: dict[str, Rows]
    needs: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledMesh:
    """A model and its optimizer as jitted functions over a mesh.

    Attributes:
      step: ``state, rows, batch -> state, rows, Seen``; the old state and rows are donated.
      predict: ``state, rows, batch -> logits``, (batch,) float32 on all devices.
      merge: the (model, optimizer) modules over a state.
    """

    step: Callable[[State, StackRows, MeshBatch], tuple[State, StackRows, Seen]]
    predict: Callable[[State, StackRows, MeshBatch], jax.Array]
    merge: Callable[[State], tuple[Any, SparseOptimizer]]


def compile_mesh(
    model: Any,
    optimizer: SparseOptimizer,
    mesh: Mesh,
    *,
    reduce: Reduce = "local",
    exchange: Kind = "padded",
    computes: Computes = None,
    loss: Loss = binary_cross_entropy,
    training: bool = True,
) -> tuple[State, CompiledMesh]:
    """Splits modules into the state, as it is on one device, and functions over a mesh.

    Args:
      model: a ``SparseModel`` whose layout has planned stacks.
      optimizer: made for this model.
      mesh: of devices, with the one axis "devices".
      reduce: see ``MeshConfig``.
      exchange: how rows and sums travel between devices.
      computes: of the plan: which devices run the dense model. Those that do not keep old dense parameters in the
        state; see ``jrec.train.mesh_dense``.
      loss: of logits and batch, a mean over the batch's examples.
      training: whether rows have slots; without them only ``predict`` works.
    """
    graph, state = nnx.split((model, optimizer))
    over, everywhere = PartitionSpec(AXIS), PartitionSpec()
    planned = [s.name for s in model.embeddings.layout.members if s.tier == "planned"]
    specs = dict.fromkeys(planned, MeshRows.specs(optimizer.embedding if training else None))

    def train(state: State, rows: StackRows, batch: MeshBatch) -> tuple[State, StackRows, Seen]:
        model, optimizer = nnx.merge(graph, state)
        how: Any = {"reduce": reduce, "exchange": exchange, "computes": computes, "loss": loss}
        rows, seen = mesh_train_step(model, optimizer, rows, local_view(batch), **how)
        return nnx.state((model, optimizer)), rows, seen

    def infer(state: State, rows: StackRows, batch: MeshBatch) -> jax.Array:
        model, _ = nnx.merge(graph, state)
        logits = mesh_predict(model, rows, local_view(batch), exchange=exchange, computes=computes)
        return of_examples(logits, computes)

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, specs, over), check_vma=False)
    return state, CompiledMesh(
        step=jax.jit(mapped(train, out_specs=(everywhere, specs, everywhere)), donate_argnums=(0, 1)),
        predict=jax.jit(mapped(infer, out_specs=everywhere)),
        merge=lambda state: nnx.merge(graph, state),
    )


def mesh_train_step(
    model: Any,
    optimizer: SparseOptimizer,
    rows: StackRows,
    batch: MeshBatch,
    *,
    resident: Mapping[str, Rows] | None = None,
    reduce: Reduce = "local",
    exchange: Kind = "padded",
    computes: Computes = None,
    loss: Loss = binary_cross_entropy,
) -> tuple[dict[str, MeshRows], Seen]:
    """``jrec.nn.train_step`` on one device's part, in place on model and optimizer. Call it inside ``shard_map``.

    Args:
      model: a ``SparseModel``.
      optimizer: made for this model.
      rows: the device's views of the planned stacks.
      batch: the device's part.
      resident: by host stack that the batch brings no rows of, (n, dim) rows that all devices hold, with slots.
      reduce: see ``MeshConfig``.
      exchange: how rows and sums travel between devices.
      computes: which devices run the dense model; the parts of the others are blank.
      loss: of logits and batch, a mean over the part's examples.

    Returns:
      The stacks after the step, and what the loop reads.
    """
    links = _open_links(rows, batch, exchange)
    host = {**jax.tree.map(_gathered, batch.host), **(resident or {})}
    activations, residuals = _lookup(model, rows, host, batch, links)
    examples = batch.batch
    real = jnp.sum(examples.mask)
    weight = real / jnp.maximum(jax.lax.psum(real, AXIS), 1)
    found = gradients_of(model, activations, examples, loss, weight, computes)
    (value, logits), (dense_gradients, gradients) = found
    step, key = optimizer.step.astype(jnp.int32), optimizer.rounding_key()
    updated, returned = {}, {}
    names = sorted(plan_stack(s) for s in model.embeddings.layout.members if s.tier != "tt")
    implementation = model.embeddings.implementation
    for name in dict.fromkeys((*rows, *host)):
        # As ``jrec.ops.lookup.apply_gradients`` derives it on one device, whose stack has the plan's name.
        of_stack = None if key is None else rounding.derived_key(key, names.index(plan_stack(name)))
        options = StepOptions(step=step, rounding_key=of_stack, implementation=implementation)
        found, route = residuals[name], batch.routes[name]
        of_rows = casted_gather_reduce(found.cast, gradients[name], found.weights, implementation=implementation)
        if name in rows:
            updated[name] = update(
                optimizer.embedding,
                rows[name],
                route,
                links[name].exchange,
                of_rows,
                sent=links[name].sent,
                bag_gradients=gradients[name],
                reduce=reduce,
                options=options,
            )
        if name in host:
            values, slots = update_shared(
                optimizer.embedding,
                host[name].values,
                host[name].slots,
                route.host,
                of_rows,
                reduce=reduce,
                addresses=route.addresses,
                options=options,
            )
            returned[name] = Rows(values=values, slots=slots)
    for name, stack in model.embeddings.tt.items():
        slots = {slot: variable[...] for slot, variable in optimizer.slots[name].items()}
        slots = step_tt(
            stack,
            optimizer.embedding,
            slots,
            residuals[name],
            gradients[name],
            cores=optimizer.cores,
            step=step,
            rounding_key=key,
            reduce=reduce,
            computes=computes,
        )
        for slot, variable in optimizer.slots[name].items():
            variable[...] = slots[slot]
    optimizer.dense.update(model, summed(dense_gradients, computes))
    labels, needs = _labels_and_needs(examples.labels, batch.needs, computes)
    return updated, Seen(
        loss=jax.lax.psum(value, AXIS),
        logits=of_examples(logits, computes),
        labels=labels,
        mask=of_examples(examples.mask, computes),
        host=returned,
        needs=needs,
    )


def _labels_and_needs(
    labels: jax.Array, needs: jax.Array | None, computes: Computes
) -> tuple[jax.Array, jax.Array | None]:
    """Labels of all parts, and the greatest needs of all devices, by one collective: small ones cost as large ones."""
    if needs is None:
        return of_examples(labels, computes), None
    bits = jax.lax.bitcast_convert_type(labels, jnp.int32)  # floats as integers travel unchanged, not the reverse
    found = jax.lax.all_gather(jnp.concatenate([bits, needs.reshape(-1)]), AXIS)
    every = jax.lax.bitcast_convert_type(found[:, : labels.size], jnp.float32)
    if computes is not None:
        every = every[np.flatnonzero(computes)]
    return every.reshape(-1), found[:, labels.size :].max(axis=0).reshape(needs.shape)


def mesh_predict(
    model: Any, rows: StackRows, batch: MeshBatch, *, exchange: Kind = "padded", computes: Computes = None
) -> jax.Array:
    """Logits of one device's part, (examples,) float32. Call it inside ``shard_map``."""
    host = jax.tree.map(_gathered, batch.host)
    activations, _ = _lookup(model, rows, host, batch, _open_links(rows, batch, exchange))
    return predicted(model, activations, batch.batch, computes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Links:
    """A step's traffic of one planned stack: rows that are asked for, and lookups that are sent; None for no such."""

    exchange: Exchange | None
    sent: Sent | None


def _open_links(rows: StackRows, batch: MeshBatch, kind: Kind) -> dict[str, _Links]:
    links = {}
    for name, of in rows.items():
        remote, sends = batch.routes[name].remote, batch.sends.get(name)
        links[name] = _Links(
            exchange=None if remote is None else Exchange.open(remote, shard_rows=of.sharded.shape[0], kind=kind),
            sent=None if sends is None else Sent.open(sends, kind=kind),
        )
    return links


def _lookup(
    model: Any, rows: StackRows, host: Mapping[str, Rows], batch: MeshBatch, links: Mapping[str, _Links]
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """``EmbeddingCollection.lookup`` where a part's unique rows stand in for planned stacks.

    A bag is the sum of its unique rows and of what the owners of other rows have pooled of it.
    """
    embeddings, bags = model.embeddings, batch.batch.bags
    values = {name: of.values for name, of in host.items()}
    tables = {
        name: retrieve(of, batch.routes[name], links[name].exchange, host=values.get(name)) for name, of in rows.items()
    }
    options = StepOptions(implementation=embeddings.implementation)
    pooled = {n: of.sent.pooled(rows[n].sharded, options=options) for n, of in links.items() if of.sent is not None}
    for name in [name for name in host if name not in rows]:
        picks = batch.routes[name].host  # as many as unique rows, in their order
        tables[name] = values[name].at[picks.rows].get(mode="clip", wrap_negative_indices=False)
    of_planned = {name: bags[name] for name in tables}
    activations, planned = lookup(tables, of_planned, implementation=embeddings.implementation)
    activations |= {name: activations[name] + away for name, away in pooled.items()}
    residuals: dict[str, Residuals | Any] = {**planned}
    for name, stack in embeddings.tt.items():
        activations[name], residuals[name] = stack.lookup(bags[name])
    return activations, residuals


def _gathered(values: jax.Array) -> jax.Array:
    return jax.lax.all_gather(values, AXIS, tiled=True)
