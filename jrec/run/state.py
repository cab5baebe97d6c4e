"""The state of a run: the state of model and optimizer, and the rows of every stack in its tier."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.checkpoint import Saved
from jrec.checkpoint.settled import Settled
from jrec.checkpoint.sources import CheckpointSource
from jrec.data.growing_tables import GrowingTables, Grown
from jrec.host.paging import MemoryLimit
from jrec.mesh.communication import state_of_first
from jrec.mesh.route import MeshRows
from jrec.nn import SparseOptimizer
from jrec.nn.optimizer import SparseModel
from jrec.ops.current_rows import current_on_host
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags
from jrec.row_optimizers import LAST, RowOptimizer, optimizer_of
from jrec.run.checkpoint import StateRows
from jrec.run.feeds.feed import Ready
from jrec.run.options import HostOptions
from jrec.run.placement.model_rows import ModelRows
from jrec.run.placement.new_lines import FirstRows, NewInStacks, SetAddresses, new_addresses
from jrec.run.placement.setup import MeshSetup
from jrec.run.placement.sharded_tier import ShardedTier
from jrec.run.placement.tiers import CoresTier, HostTier, ModelTier, Tier
from jrec.run.step import FlatState, HostResults, Metrics, State, StepOn, StepResults, compile_run

_MOST = 1 << 16  # rows that are read at once


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
      tiers: By stack, where its rows live.
      tables: By stack, the rows in host memory that batches read.
    """

    def __init__(
        self,
        model: SparseModel,
        optimizer: SparseOptimizer,
        *,
        key: jax.Array,
        host: HostOptions = HostOptions(),  # noqa: B008, frozen
        setup: MeshSetup | None = None,
        held: ModelRows | None = None,
        training: bool = True,
        saves: bool = False,
        growing: GrowingTables | None = None,
    ):
        self.layout, self.setup, self.training = model.embeddings.layout, setup, training
        layout, self._in_state = self.layout, StateRows(model.embeddings.layout, lambda: self.state)
        self._optimizer = optimizer.of if training else None
        self.growing = GrowingTables(layout, {}) if growing is None else growing
        self.first_rows = FirstRows(
            layout, self.growing.names, key=key, optimizer=self._optimizer, step=self._step_on_device
        )
        mesh, together = (None, None) if setup is None else (setup.mesh, setup.communication)
        state, self.compiled = compile_run(model, optimizer, mesh=mesh, communication=together, training=training)
        self._flat = FlatState.of(state if setup is None else setup.everywhere(state))
        computes = None if together is None else together.computes
        self._caught_up = None if mesh is None or computes is None else state_of_first(mesh, computes)
        self._behind = False
        self._tracked = False  # the rows that steps change: the first checkpoint has all rows anyway
        size = host.memory_bytes("HostOptions.memory", "HostOptions.folder")
        limit = MemoryLimit(size) if size else None
        self.tiers = {stack.name: self._tier(stack, key, host, limit, held) for stack in layout.members}
        self.tables = {name: tier.host for name, tier in self.tiers.items() if tier.host is not None}
        if saves:
            for tier in self.tiers.values():
                if tier.changing is not None:
                    tier.changing.compile_reads()

    def _tier(
        self, stack: Stack, key: jax.Array, host: HostOptions, limit: MemoryLimit | None, held: ModelRows | None
    ) -> Tier:
        own, layout = optimizer_of(self._optimizer, stack.name), self.layout
        if stack.compressed:
            return CoresTier(stack, lambda: self.modules()[0])
        if self.setup is not None:
            return ShardedTier(stack, self.setup, own, key, host, held, limit)
        if stack in layout.host_stacks:
            return HostTier(stack, own, key, host, limit)
        return ModelTier(stack, own, functools.partial(self._in_state.of, stack.name))

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
            self._flat, self._behind = FlatState.of(self._caught_up(self._flat.state)), False
        return self._flat.state

    @property
    def rows(self) -> dict[str, MeshRows]:
        """The rows of planned stacks, by stack."""
        return {name: rows for name, tier in self.tiers.items() if (rows := tier.rows) is not None}

    def _take_rows(self, rows: Mapping[str, MeshRows]) -> None:
        for name, of_stack in rows.items():
            self.tiers[name].put(of_stack)

    def step(self, ready: Ready, step_on: StepOn, metrics: Metrics | None = None) -> tuple[HostResults, StepResults]:
        """Takes a step on each batch; returns what goes back to host memory after it, and the steps' outputs.

        Args:
          ready: The batches.
          step_on: The step (``CompiledRun.with_loss``).
          metrics: What the steps before have counted, or None.
        """
        # Before the step overwrites them in place: a checkpoint under way copies rows as they were.
        for name, tier in self.tiers.items() if self._tracked else ():
            if tier.changing is not None:
                for batch in ready.batches:
                    tier.changing.before_step(_changed(batch.bags[name]))
        if (grown := ready.grown) is not None and (new := self._new_lines(grown)):
            self._renew(new)
        # Donated: from here on the arrays of ``_flat``, ``rows`` and ``ready.host`` are deleted, and only the results
        # are read.
        self._flat, rows, host, outputs = step_on(self._flat, self.rows, ready.host, ready.prepared, metrics)
        self._take_rows(rows)
        # Devices that only keep tables did not step their copies of the dense parameters (``state``).
        self._behind = True
        # Behind the step: until it is dispatched, a checkpoint must have the keys that the rows belong to.
        if grown is not None:
            self.growing.taken(grown)
        return host, outputs

    def calibrate(self, scale: float, shift: float) -> tuple[float, float]:
        """See ``Run.calibrate``."""
        state = self.state
        calibration = state[0].get("calibration")
        if calibration is None:
            raise ValueError("the model has no calibration; make it with calibrated=True (model.calibrate)")
        variable = calibration["coefficients"]
        before = np.asarray(variable[...]).tolist()
        variable[...] = jax.device_put(np.array([scale, shift], np.float32), variable[...].sharding)
        self._flat = FlatState.of(state)
        return before[0], before[1]

    def modules(self) -> tuple[SparseModel, SparseOptimizer]:
        """Model and optimizer with the current state."""
        return self.compiled.merge(self.state)

    def read(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows of a table as the last step left them; rows in host memory are flushed.

        Every process calls it with the same arguments.

        Args:
          name: The table.
          ids: (n,) integers.

        Returns:
          (n, dim) of the table's dtype; of tensor-train rows, float32.

        Raises:
          ValueError: If there is no such table or row.
        """
        ids = self._checked(name, ids)
        parts = [(here, self._read(stack, addresses)) for stack, _, here, addresses in self._parts(name, ids)]
        out = np.empty((ids.size, parts[0][1].shape[1]), np.result_type(*(part.dtype for _, part in parts)))
        for here, part in parts:
            out[here] = part
        return out

    def write(self, name: str, ids: np.ndarray, values: np.ndarray) -> None:
        """Sets rows of a table, which then have no past: their slots are as of rows that no step has touched.

        Every process calls it with the same arguments, while no batch is on its way.

        Args:
          name: The table.
          ids: (n,) integers, each once.
          values: (n, dim) floats.

        Raises:
          ValueError: If there is no such table or row, one is there twice or in tensor-train cores, or values are not
            finite, or of another shape.
        """
        ids, dims = self._checked(name, ids), {t.name: s.dim for s in self.layout.members for t in s.tables}
        if values.shape != (ids.size, dims[name]) or values.dtype.kind not in "fiuV":
            raise ValueError(
                f"rows of table {name!r} are {values.dtype} of shape {values.shape}; give floats of shape"
                f" ({ids.size}, {dims[name]})"
            )
        order = np.argsort(ids, kind="stable")
        ids, values = ids[order], values[order]
        if (twice := ids[1:] == ids[:-1]).any():
            raise ValueError(f"row {ids[1:][twice][0]} of table {name!r} is given twice")
        # All pieces are checked before the first is written: a refused call changes nothing.
        step, new = int(self.modules()[1].step), list[tuple[Stack, SetAddresses]]()
        for stack, number, here, addresses in self._parts(name, ids):
            if stack.compressed and here.any():
                raise ValueError(
                    f"row {ids[here][0]} of table {name!r} is in tensor-train cores, which all rows share; keep the"
                    " table whole, or set its rows before it is compressed"
                )
            with np.errstate(over="ignore"):
                rows = values[here].astype(stack.dtype)
            if not (finite := np.isfinite(rows.astype(np.float32)).all(axis=1)).all():
                raise ValueError(f"the vector of row {ids[here][~finite][0]} of table {name!r} is not finite")
            # Pieces of one size at most, each a bucket: few programs are compiled, and little is on the device at a
            # time.
            for begin in range(0, addresses.size, _MOST):
                some = slice(begin, begin + _MOST)
                numbers = np.full(addresses[some].size, number, np.int32)
                of_piece = SetAddresses(addresses=addresses[some], numbers=numbers, values=rows[some], step=step)
                new.append((stack, of_piece))
        for stack, of_piece in new:
            self._write(stack, of_piece)

    def _step_on_device(self) -> jax.Array:
        """How many steps the optimizer has taken, () int32, without waiting for them."""
        owns = [optimizer_of(self._optimizer, stack.name) for stack in self.layout.members]
        if not any(own is not None and LAST in own.slots for own in owns):
            return jnp.int32(0)  # nobody asks
        step: Any = self._flat.state[1]["dense"]["step"][...]
        return step.addressable_shards[0].data.astype(jnp.int32)

    def _write(self, stack: Stack, new: SetAddresses) -> None:
        tier = self.tiers[stack.name]
        tier.store(new)
        if (lines := tier.new_lines(new)) is not None:
            # Rows that are set change like those of a step: a checkpoint under way needs them as they were.
            if self._tracked and tier.changing is not None:
                tier.changing.before_step(new.addresses)
            self._renew({stack.name: lines})

    def _renew(self, new: NewInStacks) -> None:
        state, rows = self.compiled.renew(self._flat.state, self.rows, self.first_rows.words, new)
        self._flat = FlatState.of(state)
        self._take_rows(rows)

    def _checked(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Row numbers of a table, (n,) int64; raises ValueError where there is none of them."""
        rows = table_rows(self.layout, name)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"ids must be integers of shape (n,), but are {ids.dtype} of shape {ids.shape}")
        ids = ids.astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < rows:
            worst = ids[(ids < 0) | (ids >= rows)][0]
            raise ValueError(f"table {name!r} has no row {worst}; its rows are 0 to {rows - 1:,}")
        return ids

    def _parts(self, name: str, ids: np.ndarray) -> Iterator[tuple[Stack, int, np.ndarray, np.ndarray]]:
        """The stacks with a part of a table, its number there, which ids are of it, (n,) bool, and their addresses."""
        for stack in self.layout.members:
            for number, (table, base) in enumerate(zip(stack.tables, stack.bases, strict=True)):
                if table.name == name:
                    here = (ids >= table.first_row) & (ids < table.first_row + table.rows)
                    yield stack, number, here, ids[here] - table.first_row + base

    def _read(self, stack: Stack, addresses: np.ndarray) -> np.ndarray:
        """The rows at addresses of one table as lookups read them."""
        tier, optimizer = self.tiers[stack.name], optimizer_of(self._optimizer, stack.name)
        if optimizer is None or not optimizer.has_tail or stack.compressed:
            return tier.read(addresses)
        step = int(self.modules()[1].step)
        pieces = np.array_split(addresses, max(1, -(-addresses.size // _MOST)))
        return np.concatenate([current_on_host(optimizer, *tier.read_all(some), step) for some in pieces])

    def optimizer_of_table(self, name: str) -> RowOptimizer | None:
        """The optimizer of a table's uncompressed rows; None of frozen ones, and in a run that only predicts."""
        stacks = (s.name for s in self.layout.members if not s.compressed and name in (t.name for t in s.tables))
        return optimizer_of(self._optimizer, next(stacks))

    def settled(self) -> dict[str, Settled]:
        """How the rows are stored that exact optimizers step, by table."""
        names = [table.name for stack in self.layout.members if not stack.compressed for table in stack.tables]
        owns = {name: own for name in names if (own := self.optimizer_of_table(name)) is not None and own.has_tail}
        step = int(self.modules()[1].step) if owns else 0
        return {name: Settled.of(own, step) for name, own in owns.items()}

    def _new_lines(self, grown: Grown) -> NewInStacks:
        """Where rows on devices get first values, by stack."""
        new = {name: new_addresses(tier.stack, grown) for name, tier in self.tiers.items()}
        lines = {name: self.tiers[name].new_lines(of_stack) for name, of_stack in new.items() if of_stack is not None}
        return {name: of_stack for name, of_stack in lines.items() if of_stack is not None}

    def sources(self) -> Sequence[CheckpointSource]:
        """The tables' rows after the last step, for a checkpoint. Call once rows in host memory are flushed."""
        self._tracked = True
        return [source for tier in self.tiers.values() for source in tier.sources]

    def restore(self, saved: Saved, state: State, *, rows: bool = True) -> None:
        """Restores a checkpoint: its state, and, if ``rows``, its rows that are not in the state.

        Raises:
          CheckpointError: If the rows are damaged, or belong to other tables.
        """
        self._flat, self._behind = FlatState.of(state), False
        self._tracked = True
        for tier in self.tiers.values() if rows else ():
            tier.load(saved, slots=self.training)


def table_rows(layout: EmbeddingLayout, name: str) -> int:
    """How many rows a table has.

    Raises:
      ValueError: If there is no such table.
    """
    tables = {table.name: table.table_rows for stack in layout.members for table in stack.tables}
    if name not in tables:
        raise ValueError(f"there is no table {name!r}; the tables are {', '.join(sorted(tables))}")
    return tables[name]


def _changed(bags: Bags) -> np.ndarray:
    """The addresses of rows that a step on bags of NumPy arrays may change."""
    return np.asarray(bags.ids if bags.cast is None else bags.cast.rows[: int(bags.cast.num_unique)])
