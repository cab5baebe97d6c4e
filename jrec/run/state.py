"""The state of a run in all places: the state of model and optimizer, planned rows, and rows in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jrec.checkpoint import HostRows as HostSource
from jrec.checkpoint import Saved
from jrec.checkpoint.changing import ChangingRows
from jrec.checkpoint.sources import Source
from jrec.data.growing_tables import GrowingTables
from jrec.host import HostTable
from jrec.mesh.communication import settled
from jrec.mesh.route import MeshRows
from jrec.nn import SparseOptimizer
from jrec.row_optimizers import optimizer_of
from jrec.run.checkpoint import before_step, device_rows
from jrec.run.feed import Ready
from jrec.run.first_rows import FirstRows
from jrec.run.held import HeldRows
from jrec.run.host_tables import host_tables
from jrec.run.mesh_checkpoint import mesh_sources, saved_rows, saved_stack
from jrec.run.mesh_host_rows import load_host_rows, planned_host_tables
from jrec.run.mesh_rows import initial_rows, initial_stack
from jrec.run.mesh_setup import MeshSetup
from jrec.run.options import HostOptions
from jrec.run.step import HostResults, Seen, State, StepOn, compile_run


class RunState:
    """The state of a run, and its step.

    Args:
      model: The model, whose arrays may be abstract.
      optimizer: The model's optimizer.
      key: The key of the initial rows that the model does not hold.
      host: How rows in host memory are kept.
      setup: Mesh and plan; None on one device without a plan.
      held: The rows of planned tables, where they are not to be initial ones.
      training: Whether rows have slots.
      saves: Whether checkpoints will be written while steps go on.
      growing: The tables that grow; None where none does.

    Attributes:
      compiled: The compiled functions of the state.
      growing: The tables that grow, if any.
      first_rows: Makes the first values of their rows.
      tables: By stack, the rows in host memory that batches read.
    """

    def __init__(
        self,
        model: Any,
        optimizer: SparseOptimizer,
        *,
        key: jax.Array,
        host: HostOptions = HostOptions(),  # noqa: B008, frozen
        setup: MeshSetup | None = None,
        held: HeldRows | None = None,
        training: bool = True,
        saves: bool = False,
        growing: GrowingTables | None = None,
    ):
        self.layout, self.setup, self.training = model.embeddings.layout, setup, training
        layout, self._key = self.layout, key
        self._optimizer = optimizer.of if training else None
        self.growing = GrowingTables(layout, {}) if growing is None else growing
        self.first_rows = FirstRows(layout, self.growing.names, key=key, optimizer=self._optimizer, setup=setup)
        mesh, together = (None, None) if setup is None else (setup.mesh, setup.communication)
        state, self.compiled = compile_run(model, optimizer, mesh=mesh, communication=together, training=training)
        self._state: State = state if setup is None else setup.everywhere(state)
        computes = None if together is None else together.computes
        self._caught_up = None if mesh is None or computes is None else settled(mesh, computes)
        self._behind = False
        self._rows: dict[str, MeshRows] | None = None
        self._whole = host_tables(layout, key, self._optimizer, host)
        self._partly: Mapping[str, HostTable] = {}
        if setup is not None:
            self._partly = planned_host_tables(layout, setup.plan, key, self._optimizer, host, setup.owners)
        self.tables = {**self._whole, **({n: self._partly[n] for n in setup.host_stacks} if setup else {})}
        self._device_sources: dict[str, ChangingRows] = {**device_rows(layout, self._optimizer, lambda: self.state)}
        if setup is not None:
            self._device_sources |= mesh_sources(
                layout, setup.plan, setup.mesh, self._optimizer, lambda stack: self.rows[stack], setup.peers
            )
        self._host_sources = {name: HostSource(table) for name, table in {**self._whole, **self._partly}.items()}
        if setup is not None and held is not None:
            held.store(self._partly, setup.plan, setup.owners)
            self._rows = {}
            for stack in layout.planned_stacks:
                plan, own = setup.plan, optimizer_of(self._optimizer, stack.name)
                if held.has(stack):
                    self._rows[stack.name] = saved_stack(held, stack, plan, setup.mesh, own)
                else:
                    self._rows[stack.name] = initial_stack(stack, plan, setup.mesh, key, own)
        if saves:
            for rows in self._device_sources.values():
                rows.compile_reads()

    @property
    def frozen(self) -> frozenset[str]:
        """The stacks with rows in host memory that no step updates."""
        return frozenset(name for name in self.tables if optimizer_of(self._optimizer, name) is None)

    @property
    def state(self) -> State:
        """Dense parameters and all other state that every device has, equal on all of them.

        Devices that only keep tables have copies that fall behind with every step; reading this property updates them.
        """
        if self._behind and self._caught_up is not None:
            self._state, self._behind = self._caught_up(self._state), False
        return self._state

    @property
    def rows(self) -> dict[str, MeshRows]:
        """Planned stacks, made at the first use: a restored run makes none."""
        if self._rows is None:
            self._rows = {}
            if (setup := self.setup) is not None:
                self._rows = initial_rows(setup.layout, setup.plan, setup.mesh, self._key, self._optimizer)
        return self._rows

    def step(self, ready: Ready, step_on: StepOn | None = None) -> tuple[HostResults, Seen]:
        """Takes a step on a batch; returns what goes back to host memory after the step, and the step's outputs.

        Args:
          ready: The batch.
          step_on: The step (``CompiledRun.with_loss``); None for the one with the loss of ``compile_run``.
        """
        step_on = step_on or self.compiled.step_on
        before_step(self._device_sources, ready.batch)
        if (grown := ready.grown) is not None and (new := self.first_rows.on_devices(grown)):
            rows, self._rows = self.rows, None
            self._state, self._rows = self.compiled.renew(self._state, rows, self.first_rows.words, new)
        self._state, self._rows, host, outputs = step_on(self._state, self.rows, ready.host, ready.prepared)
        self._behind = True
        if grown is not None:
            self.growing.taken(grown)
        return host, outputs

    def modules(self) -> tuple[Any, SparseOptimizer]:
        """Model and optimizer with the current state."""
        return self.compiled.merge(self.state)

    def sources(self) -> Sequence[Source]:
        """The tables' rows after the last step, for a checkpoint. Call once host memory has settled."""
        return [*self._device_sources.values(), *self._host_sources.values()]

    def restore(self, saved: Saved, state: State, *, rows: bool = True) -> None:
        """Restores a checkpoint: its state, and, if ``rows``, its rows that are not in the state.

        Raises:
          CheckpointError: If the rows are damaged, or belong to other tables.
        """
        self._state, self._behind = state, False
        if not rows:
            return
        for name in self._whole:
            self._host_sources[name].restore(saved, slots=self.training)
        if (setup := self.setup) is not None:
            load_host_rows(self._partly, setup.plan, saved, setup.owners)
            self._rows = saved_rows(saved, setup.layout, setup.plan, setup.mesh, self._optimizer)
