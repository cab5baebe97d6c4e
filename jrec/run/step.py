"""The compiled functions of a run: one step on donated state and rows, and prediction, on a device or over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.host.ring import Rows
from jrec.mesh.communication import Communication
from jrec.mesh.route import AXIS, MeshRows, local_view
from jrec.mesh.routing import AddressMap, HostAddressMap, Routing, routed_ahead
from jrec.nn import SparseOptimizer, binary_cross_entropy
from jrec.nn.optimizer import Loss, SparseModel
from jrec.nn.step import StepOutputs, predict_on, train_step_on, weight_and_examples
from jrec.ops.dispatch import Implementation
from jrec.ops.types import Bags, TreeStructure
from jrec.run.placement.new_lines import MeshLines, NewInStacks, on_device, renewed_in
from jrec.shown import Shown, counted
from jrec.tiers.local_rows import of_batch
from jrec.tiers.pooled import PooledRows, PooledUpdate
from jrec.tiers.routed_rows import RoutedRows
from jrec.tiers.store import Store

State = nnx.State  # of (model, optimizer): every array that all devices hold alike
StackRows = Mapping[str, MeshRows]  # by planned stack
HostRows = Mapping[str, Rows]  # by stack, a batch's rows from host memory; on a mesh (N * K, dim), K of each device
HostResults = Mapping[str, Any]  # by stack, what a step gives back: ``Rows``, or a ``PooledUpdate`` of pooled rows


@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
    """How a state's arrays lie in it; compared by identity first, which is quick."""

    tree: TreeStructure

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.tree == other.tree)

    def __hash__(self) -> int:
        return self.tree.num_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatState:
    """A state as its arrays, which JAX takes apart and puts together in a quarter of the time of an ``nnx.State``."""

    arrays: list[jax.Array]
    structure: _Structure = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(state: State) -> FlatState:
        """The arrays of a state."""
        arrays, tree = jax.tree.flatten(state)
        return FlatState(arrays, _Structure(tree))

    @property
    def state(self) -> State:
        """The state of the arrays."""
        return jax.tree.unflatten(self.structure.tree, self.arrays)


class StepOn(Protocol):
    """A jitted step, or steps, of a batch: takes ``state``, ``rows`` and ``host`` to the next ones in place."""

    def __call__[S: (State, FlatState)](  # noqa: D102, the class says it
        self, state: S, rows: StackRows, host: HostRows, batch: StepBatch, metrics: Metrics | None = None, /
    ) -> tuple[S, StackRows, HostResults, StepResults]: ...

    def trace(self, *arguments: object) -> jax.stages.Traced:
        """The traced program of arguments, which may be abstract."""
        ...

    def lower(self, *arguments: object) -> jax.stages.Lowered:
        """The same, lowered."""
        ...


class Metrics(Protocol):
    """What steps count on the devices, a pytree; on a mesh with an axis of devices, each of which counts its own."""

    def updated(self, logits: PyTree[jax.Array], labels: jax.Array, mask: jax.Array) -> Self:
        """With some examples counted: what the model's ``logits`` returned, and (examples,) float32."""
        ...


_NONE: Mapping[str, Routing] = {}
_Carry = tuple[State, StackRows, Metrics | None]  # what goes from step to step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A batch as the compiled functions take it; on a mesh every leaf has an axis of devices in front.

    Attributes:
      batch: The examples of each device; ids of planned and host stacks number their unique rows.
      steps: How many batches it holds, for one step each in one dispatch: of more than one every leaf has an axis of
        them in front.
      places: By planned stack, where the devices find its rows: the same for every batch.
      hosts: By planned stack with rows in host memory that batches read, where devices find this batch's host rows.
      pooled: By stack, the rows in host memory that the host has pooled. They are not donated: their memory is NumPy's,
        and XLA would copy it before it writes to it.
    """

    batch: Batch
    places: dict[str, AddressMap] = dataclasses.field(default_factory=dict)
    hosts: dict[str, HostAddressMap] = dataclasses.field(default_factory=dict)
    pooled: dict[str, PooledRows] = dataclasses.field(default_factory=dict)
    steps: int = dataclasses.field(default=1, metadata={"static": True})


def _shown(value: PyTree) -> str:
    """An array by its value where it is one number, else by dtype and shape; of a tree, its number of arrays."""
    if not hasattr(value, "shape"):
        return counted(len(jax.tree.leaves(value)), "array")
    if value.shape == () and not isinstance(value, Tracer):
        return f"{float(value):.6g}"
    return f"{value.dtype}{list(value.shape)}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResults:
    """What a step leaves to be read, equal on all devices: the examples of all parts, device by device.

    Of several steps in one dispatch every array but ``metrics`` has an axis of steps in front.

    Attributes:
      loss: () float32, of the whole batch.
      examples: () float32, the batch's examples, without padding.
      logits: (batch,) float32 before the step, or whatever else the model's ``logits`` returns, examples first. None,
        as the next two, where metrics count them: on a mesh they would travel to every device.
      labels, mask: (batch,) float32.
      gradient_norm: () float32, the norm of all gradients before they were clipped; None where nothing clips them.
      metrics: What the steps so far have counted, or None.
    """

    loss: jax.Array
    examples: jax.Array
    logits: PyTree[jax.Array] = None
    labels: jax.Array | None = None
    mask: jax.Array | None = None
    gradient_norm: jax.Array | None = None
    metrics: Any = None

    def __repr__(self) -> str:
        return f"StepResults: {', '.join(' '.join(row) for row in self._rows())}"

    def _repr_html_(self) -> str:
        return Shown(("StepResults",), self._rows()).html()

    def _rows(self) -> list[tuple[str, str]]:
        """Name and value of all that is not None."""
        named = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, _shown(value)) for name, value in named if value is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """A model and its optimizer, split into a state and jitted functions of it.

    Attributes:
      step_on: A step by binary cross-entropy: tables and slots change in place. The second ``host`` also has a
        ``PooledUpdate`` of each stack of ``batch.pooled`` that is not frozen.
      with_loss: Makes a ``step_on`` of a loss, and of the number of slices in which the dense model sees the examples.
      renew: ``state, rows, words, new -> state, rows``, with first values and slots in the lines ``new`` (by stack,
        ``NewLines``; on a mesh ``MeshLines``) by the key of initial rows (``key_words``). State and rows are donated.
      predict_on: ``state, rows, host, batch -> logits``, (batch,) float32.
      merge: The (model, optimizer) modules over a state.
    """

    step_on: StepOn
    with_loss: Callable[[Loss, int], StepOn]
    renew: Callable[[State, StackRows, np.ndarray, NewInStacks], tuple[State, dict[str, MeshRows]]]
    predict_on: Callable[[State, StackRows, HostRows, StepBatch], PyTree[jax.Array]]
    merge: Callable[[State], tuple[SparseModel, SparseOptimizer]]

    def step(self, state: State, batch: Batch) -> tuple[State, jax.Array, jax.Array]:
        """A step of a model that holds all of its rows: the new state, the loss and the logits before the step."""
        state, _, _, results = self.step_on(state, {}, {}, StepBatch(batch=batch))
        return state, results.loss, results.logits

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """Logits, (batch,) float32, of a model that holds all of its rows."""
        return self.predict_on(state, {}, {}, StepBatch(batch=batch))


def compile_run(
    model: SparseModel,
    optimizer: SparseOptimizer,
    *,
    mesh: Mesh | None = None,
    communication: Communication | None = None,
    training: bool = True,
) -> tuple[State, CompiledRun]:
    """Splits modules into the initial state and its functions.

    Args:
      model: A ``SparseModel``.
      optimizer: Made for this model.
      mesh: The device mesh, with the one axis "devices"; None for one device without a plan.
      communication: How the devices of the mesh work together; None for the defaults. Devices that do not compute keep
        old dense parameters in the state; see ``jrec.mesh.communication``.
      training: Whether planned rows have slots; without them only ``predict_on`` works.

    Example:
      >>> state, run = compile_run(model, optimizer)
      >>> state, loss, logits = run.step(state, batch)
    """
    # Split once: the graph is static and closed over, so that each call handles only arrays.
    graph, state = nnx.split((model, optimizer))
    together = None if mesh is None else communication or Communication()
    implementation = model.embeddings.implementation  # the step's functions keep no module, which has all arrays

    def one(
        loss: Loss,
        micro_batches: int,
        carry: _Carry,
        host: HostRows,
        prepared: StepBatch,
        routed: Mapping[str, Routing] = _NONE,
    ) -> tuple[_Carry, HostResults, StepResults]:
        state, rows, metrics = carry
        model, optimizer = nnx.merge(graph, state)
        stores, batch = _stores(rows, host, prepared, routed)
        options = {"communication": together, "micro_batches": micro_batches}
        outputs = train_step_on(model, optimizer, stores, batch, loss=loss, **options)
        results = _results(outputs, batch, together, with_logits=metrics is None)
        if metrics is not None:
            metrics = metrics.updated(outputs.logits, batch.labels, batch.mask)
        # The same structure as came in: donated buffers are matched to results leaf by leaf, and a scan asks for it.
        carry = nnx.state((model, optimizer)), _planned(outputs.stores, rows), metrics
        return carry, _to_host(outputs.stores, host), results

    def train(
        loss: Loss,
        micro_batches: int,
        state: State,
        rows: StackRows,
        host: HostRows,
        prepared: StepBatch,
        metrics: Metrics | None,
    ) -> tuple[State, StackRows, HostResults, StepResults, Metrics | None]:
        if mesh is not None:
            prepared, metrics = local_view((prepared, metrics))
        step, to_host = functools.partial(one, loss, micro_batches), {}
        if prepared.steps == 1:
            carry, to_host, results = step((state, rows, metrics), host, prepared)
        elif host:
            raise ValueError(f"a batch brings rows of {', '.join(host)} from host memory: steps are taken one by one")
        else:
            carry, results = _several(step, (state, rows, metrics), prepared, implementation)
        state, rows, metrics = carry
        return (
            state,
            rows,
            to_host,
            results,
            metrics if mesh is None else jax.tree.map(lambda leaf: leaf[None], metrics),
        )

    def infer(state: State, rows: StackRows, host: HostRows, prepared: StepBatch) -> jax.Array:
        model, optimizer = nnx.merge(graph, state)
        prepared = prepared if mesh is None else local_view(prepared)
        stores, batch = _stores(rows, host, prepared)
        # Without slots there is nothing to read beside rows, which were made current when they were loaded.
        logits = predict_on(model, stores, batch, optimizer=optimizer if training else None, communication=together)
        return logits if together is None else jax.tree.map(together.of_examples, logits)

    def renew(state: State, rows: StackRows, words: jax.Array, new: NewInStacks) -> tuple[State, dict[str, MeshRows]]:
        model, optimizer = nnx.merge(graph, state)
        lines, stacks = new if mesh is None else local_view(new), model.embeddings.layout.stacks
        renewed_in(model, optimizer, words, lines)
        renewed = dict(rows)
        for name in rows.keys() & lines.keys():
            of_stack = lines[name]
            assert isinstance(of_stack, MeshLines)
            renewed[name] = on_device(rows[name], stacks[name], optimizer.of(name), words, of_stack, optimizer.step)
        return nnx.state((model, optimizer)), renewed

    options: dict[str, Any] = {}
    over, everywhere, specs = PartitionSpec(AXIS), PartitionSpec(), {}
    if mesh is not None:
        planned = [stack.name for stack in model.embeddings.layout.planned_stacks]
        specs = {name: MeshRows.specs(optimizer.of(name) if training else None) for name in planned}
        # The state is alike on all devices, planned rows have specs of their own, rows of host memory and batches are
        # split over the devices. Pallas kernels refuse shard_map's check of varying values.
        options = {"mesh": mesh, "in_specs": (everywhere, specs, over, over), "check_vma": False}
        infer = jax.shard_map(infer, out_specs=everywhere, **options)
        placed = {**options, "in_specs": (everywhere, specs, everywhere, over)}
        renew = jax.shard_map(renew, out_specs=(everywhere, specs), **placed)

    def with_loss(loss: Loss, micro_batches: int) -> StepOn:
        step: Any = functools.partial(train, loss, micro_batches)
        if mesh is not None:
            placed = {**options, "in_specs": (*options["in_specs"], over)}
            step = jax.shard_map(step, out_specs=(everywhere, specs, over, everywhere, over), **placed)

        def taken(
            state: Any, rows: StackRows, host: HostRows, batch: StepBatch, metrics: Metrics | None = None
        ) -> tuple[Any, StackRows, HostResults, StepResults]:
            # Inside jit: an ``nnx.State`` is built only while the step is traced, and a call handles a list of arrays.
            before, pack = (state.state, FlatState.of) if isinstance(state, FlatState) else (state, lambda after: after)
            after, rows, host, results, metrics = step(before, rows, host, batch, metrics)
            return pack(after), rows, host, dataclasses.replace(results, metrics=metrics)

        # State, rows and host rows change in place. The batch is not donated: see ``StepBatch.pooled``.
        return jax.jit(taken, donate_argnums=(0, 1, 2))

    return state, CompiledRun(
        step_on=with_loss(binary_cross_entropy, 1),
        with_loss=with_loss,
        renew=jax.jit(renew, donate_argnums=(0, 1)),
        predict_on=jax.jit(infer),
        merge=lambda state: nnx.merge(graph, state),
    )


def _several(
    step: Callable[..., tuple[_Carry, HostResults, StepResults]],
    carry: _Carry,
    prepared: StepBatch,
    implementation: Implementation | None,
) -> tuple[_Carry, StepResults]:
    """The steps of a dispatch; on a mesh all of them are routed first where a batch may need further windows."""
    # The places serve all steps alike, so they are closed over: a leaf that is scanned has an axis of steps.
    alone = dataclasses.replace(prepared, steps=1, places={})

    def following(carry: _Carry, xs: tuple[StepBatch, dict[str, Routing]]) -> tuple[_Carry, StepResults]:
        # ``host`` is empty: several steps in one dispatch cannot wait for rows that the host brings between them.
        batch, routed = xs
        carry, _, results = step(carry, {}, dataclasses.replace(batch, places=prepared.places), routed)
        return carry, results

    def steps(routed: dict[str, Routing], carry: _Carry) -> tuple[_Carry, StepResults]:
        return jax.lax.scan(following, carry, (alone, routed))

    windowed = {name: places for name, places in prepared.places.items() if not places.fits}
    if not windowed:
        return steps({}, carry)
    routed, more = routed_ahead(windowed, prepared.batch.bags, implementation)
    # Loops over further windows ask the host in every step, so a dispatch that needs none has none.
    fitting = {name: dataclasses.replace(routing, fits=True) for name, routing in routed.items()}
    return jax.lax.cond(more, functools.partial(steps, routed), functools.partial(steps, fitting), carry)


def _stores(
    rows: StackRows, host: HostRows, prepared: StepBatch, routed: Mapping[str, Routing] = _NONE
) -> tuple[dict[str, Store], Batch]:
    """The stores of a step, and its batch, whose bags number the rows of these; some may be routed ahead."""
    batch = prepared.batch
    stores: dict[str, Store] = dict(prepared.pooled)
    bags: dict[str, Bags] = dict(batch.bags)
    for name, planned in rows.items():
        if (fetched := host.get(name)) is not None:
            planned = dataclasses.replace(planned, host=fetched.values, host_slots=fetched.slots)
        places = dataclasses.replace(prepared.places[name], host=prepared.hosts.get(name))
        stores[name] = RoutedRows(rows=planned, places=places, routing=routed.get(name))
    # Stacks that lie in host memory as a whole: the batch's unique rows are all of the table that the step sees.
    for name in host.keys() - rows.keys():
        stores[name], bags[name] = of_batch(host[name].values, host[name].slots, bags[name])
    return stores, dataclasses.replace(batch, bags=bags)


def _planned(stores: Mapping[str, Any], rows: StackRows) -> dict[str, MeshRows]:
    """The rows that stay on the mesh."""
    # Rows of host memory leave by ``_to_host``: what stays has the structure that came in, as a scan's carry must.
    return {name: dataclasses.replace(stores[name].rows, host=None, host_slots={}) for name in rows}


def _to_host(stores: Mapping[str, Any], host: HostRows) -> HostResults:
    """The rows that go back to host memory, and what the host updates pooled rows with."""
    results: dict[str, Any] = {name: store for name, store in stores.items() if isinstance(store, PooledUpdate)}
    for name in host:
        store = stores[name]
        if isinstance(store, RoutedRows):
            results[name] = Rows(values=store.rows.host, slots=dict(store.rows.host_slots))
        else:
            results[name] = Rows(values=store.values, slots=dict(store.slots))
    return results


def _results(outputs: StepOutputs, batch: Batch, together: Communication | None, *, with_logits: bool) -> StepResults:
    examples, arrays = weight_and_examples(batch, together)[1], {}
    if with_logits:
        arrays = {"logits": outputs.logits, "labels": batch.labels, "mask": batch.mask}
    if together is not None:
        arrays = jax.tree.map(together.of_examples, arrays)
    return StepResults(loss=outputs.loss, examples=examples, gradient_norm=outputs.gradient_norm, **arrays)
