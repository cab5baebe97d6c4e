"""Planned rows in checkpoints: by table and row number, independent of the plan.

So a checkpoint of any plan and mesh can be resumed under any other, or on a single device. Writing copies nothing
between devices: each row is read from the device that keeps it, by its process; replicated rows are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jrec.checkpoint.changing import ChangingRows, Part
from jrec.checkpoint.device import compile_gathers, gathered
from jrec.checkpoint.manifest import VALUES
from jrec.checkpoint.undo import DIRTY
from jrec.mesh.route import AXIS, MeshRows
from jrec.ops.layout import Stack
from jrec.ops.row_fill import PIECE_BYTES, fill_rows
from jrec.row_optimizers import RowOptimizer
from jrec.run.placement.model_rows import RowSource
from jrec.run.placement.peers import Peers
from jrec.run.placement.rows import based, device_addresses, replicated_capacity
from jrec.sharding import Plan
from jrec.sharding.contents import joined_ranges, shard_capacity, table_segments
from jrec.sharding.pieces import REPLICATED, SHARDED


class MeshSource(ChangingRows):
    """A ``CheckpointSource`` of a planned stack's rows on the devices of this process.

    Args:
      stack: The tables.
      plan: Where rows live (``placed_plan``).
      mesh: The devices.
      optimizer: The row optimizer; None where rows have no slots.
      rows: Gives the rows as they are now.
      peers: The other processes, each of which knows only which rows its own examples change; None with one process.
    """

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        mesh: Mesh,
        optimizer: RowOptimizer | None,
        rows: Callable[[], MeshRows],
        peers: Peers | None = None,
    ):
        self._devices, self._rows, self._segments = list(mesh.devices.flat), rows, _Segments(stack, plan, mesh)
        self._peers, self._lines = peers, (shard_capacity(plan, stack.name), replicated_capacity(plan, stack))
        super().__init__(stack, {} if optimizer is None else optimizer.slots, self._segments.ranges())

    def compile_all(self) -> Callable[[], None]:
        """What compiles all that reads rows, from each of this process's devices; to be called in a thread."""
        own = [device for device in self._devices if device.process_index == jax.process_index()]
        places = [*((device, self._lines[0]) for device in own), (own[0], self._lines[1])]
        shapes = next(iter(self.tables.values()))

        def arrays(device: object, lines: int) -> dict[str, jax.ShapeDtypeStruct]:
            return {
                name: jax.ShapeDtypeStruct((lines, *tail), jnp.dtype(dtype), sharding=SingleDeviceSharding(device))
                for name, (tail, dtype) in ((n, shapes.array(n)) for n in (VALUES, *shapes.slots))
            }

        def compile_each() -> None:
            for device, lines in places:
                compile_gathers(arrays(device, lines))

        return compile_each

    def changed(self) -> dict[str, tuple[int, int]]:
        """As ``ChangingRows.changed``; all processes call it together."""
        if self._peers is not None:
            self._tell(self._peers)
        return super().changed()

    def _tell(self, peers: Peers) -> None:
        """Tells every process which rows that it writes this one's examples changed, and takes down what it is told."""
        changed = np.flatnonzero(self._flags)
        # Cleared first: a row that another process writes must not count here, and this one's own come back by the
        # exchange.
        self._flags[changed] = 0
        process = self._segments.process[np.searchsorted(self._segments.start, changed, side="right") - 1]
        for (rows,) in peers.exchange([[changed[process == p]] for p in range(peers.processes)]):
            self._flags[rows] = DIRTY

    def read(self, addresses: np.ndarray) -> list[Part]:
        """Starts to read the rows at (n,) ascending addresses, each from the device that keeps it."""
        return self._parts(addresses, np.searchsorted(self._segments.start, addresses, side="right") - 1)

    def read_range(self, begin: int, stop: int) -> list[Part]:
        """Starts to read rows; as ``read``, but without a search for each."""
        addresses, start = np.arange(begin, stop), self._segments.start
        first, last = np.searchsorted(start, (begin, stop - 1), side="right") - 1
        ends = np.append(start[first + 1 : last + 1], stop)
        return self._parts(addresses, np.repeat(np.arange(first, last + 1), np.diff(ends, prepend=begin)))

    def _parts(self, addresses: np.ndarray, segments: np.ndarray) -> list[Part]:
        place, lines = self._segments.place[segments], addresses + self._segments.shift[segments]
        parts, rows = [], self._rows()
        # One gather a device that has some of the rows: they begin on all devices before the first is waited for.
        for number in np.flatnonzero(np.bincount(place)).tolist():
            at = np.flatnonzero(place == number)
            parts.append(Part(at, gathered(self._arrays_of(rows, number), lines[at])))
        return parts

    def _arrays_of(self, rows: MeshRows, place: int) -> dict[str, jax.Array]:
        if place == len(self._devices):
            arrays = {VALUES: rows.replicated, **rows.replicated_slots}
            return {name: array.addressable_shards[0].data for name, array in arrays.items()}
        arrays, device = {VALUES: rows.sharded, **rows.sharded_slots}, self._devices[place]
        return {name: _on(array, device) for name, array in arrays.items()}


class _Segments:
    """The ranges of a stack's addresses that live alike, by a plan.

    Attributes:
      start: (segments,) int64, ascending, the address that each begins with.
      stop: (segments,) int64, the address after its last.
      place: (segments,) int64, the device of sharded rows; the number of devices for replicated, -1 for host rows.
      process: (segments,) int64, which process writes them; -1 of host rows.
      shift: (segments,) int64, to be added to an address for its line in the arrays of its place.
    """

    def __init__(self, stack: Stack, plan: Plan, mesh: Mesh):
        which, self.start = table_segments(plan, based(stack))
        self.stop = self.start + (plan.stop - plan.start)[which]
        tier, self.shift = plan.tier[which], plan.offset[which] - self.start
        # Host rows have place -1, which below takes the last entry of the list, -1: no process writes them from a
        # device.
        self.place = np.select([tier == SHARDED, tier == REPLICATED], [plan.owner[which], plan.devices], -1)
        # Process 0 writes replicated rows for all.
        self.process = np.array([*(device.process_index for device in mesh.devices.flat), 0, -1])[self.place]
        self._stack = stack

    def ranges(self) -> dict[str, np.ndarray]:
        """By table, (n, 2) begins and ends of the rows on devices that this process writes, ascending, apart."""
        ranges = {}
        for table, base in zip(self._stack.tables, self._stack.bases, strict=True):
            own = (self.process == jax.process_index()) & (self.start >= base) & (self.start < base + table.rows)
            ranges[table.name] = joined_ranges(self.start[own] - base, self.stop[own] - base)
        return ranges


def saved_stack(saved: RowSource, stack: Stack, plan: Plan, mesh: Mesh, optimizer: RowOptimizer | None) -> MeshRows:
    """A planned stack of a checkpoint, each device's rows read and put there piece by piece.

    Args:
      saved: The checkpoint, written on one device or on a mesh.
      stack: The tables.
      plan: Where rows live now.
      mesh: The devices.
      optimizer: The row optimizer; None to read no slots.

    Raises:
      CheckpointError: If it is damaged or has other tables.
    """
    sharded, replicated = device_addresses(stack, plan, mesh)
    slots = {} if optimizer is None else dict(optimizer.slots)
    over, everywhere = PartitionSpec(AXIS), PartitionSpec()

    def filled(addresses: jax.Array, spec: PartitionSpec, array: str) -> jax.Array:
        tail = () if slots.get(array) == "row" else (stack.dim,)
        dtype = jnp.dtype(stack.dtype if array == VALUES else "float32")
        made = [
            fill_rows(
                (shard.data.shape[0], *tail),
                dtype,
                _lines(saved, stack, array, stack.addresses_from_device(np.asarray(shard.data))),
                device=shard.device,
            )
            for shard in addresses.addressable_shards
        ]
        shape, sharding = (addresses.shape[0], *tail), NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, made)

    return MeshRows(
        sharded=filled(sharded, over, VALUES),
        replicated=filled(replicated, everywhere, VALUES),
        sharded_slots={name: filled(sharded, over, name) for name in slots},
        replicated_slots={name: filled(replicated, everywhere, name) for name in slots},
    )


def _lines(saved: RowSource, stack: Stack, array: str, addresses: np.ndarray) -> Iterator[np.ndarray]:
    most = max(1, PIECE_BYTES // (4 * stack.dim))
    for begin in range(0, addresses.size, most):
        yield saved.read(stack, array, addresses[begin : begin + most])


def _on(array: jax.Array, device: object) -> jax.Array:
    return next(shard.data for shard in array.addressable_shards if shard.device == device)
