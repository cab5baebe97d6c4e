"""Planned rows in checkpoints: by table and row number, independent of the plan.

So a checkpoint of any plan and mesh can be resumed under any other, or on a single device. Writing copies nothing
between devices: a piece is one device's rows of one table, written by its process; replicated rows are written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.checkpoint import Saved
from jrec.checkpoint.device import gathered, stack_shapes
from jrec.checkpoint.manifest import VALUES
from jrec.checkpoint.sources import Piece
from jrec.mesh.route import AXIS, MeshRows
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.row_fill import PIECE_BYTES, fill_rows
from jrec.row_optimizers import RowOptimizer, RowOptimizers, optimizer_of
from jrec.run.mesh_rows import based, device_addresses
from jrec.run.row_source import RowSource
from jrec.sharding import Plan
from jrec.sharding.contents import replicated_addresses, shard_addresses

REPLICATED, DEVICE = "replicated", "device-{:05}"
"""Names of pieces."""


class MeshSource:
    """A planned stack's rows on the devices of this process, for a checkpoint; see ``jrec.checkpoint.sources.Source``.

    Args:
      stack: The tables.
      plan: Where rows live (``placed_plan``).
      mesh: The devices.
      optimizer: The row optimizer; None where rows have no slots.
      rows: The rows, which no step may change until the checkpoint is written.
    """

    def __init__(self, stack: Stack, plan: Plan, mesh: Mesh, optimizer: RowOptimizer | None, rows: MeshRows):
        self._stack, self._plan, self._mesh, self._rows = stack, plan, mesh, rows
        self.tables = stack_shapes(stack, {} if optimizer is None else optimizer.slots)

    def changed(self) -> dict[str, tuple[int, int]]:
        """Nothing: changes are not counted, so that every checkpoint has all rows."""
        return {}

    def begin(self, full: Collection[str]) -> list[Piece]:
        """All pieces of this process's devices, whatever ``full`` names."""
        del full
        return list(self._pieces())

    def end(self) -> None:
        """Does nothing: no step is taken while the checkpoint is written."""

    undo_bytes = 0  # no step is taken meanwhile

    def _pieces(self) -> Iterator[Piece]:
        rows, devices = self._rows, list(self._mesh.devices.flat)
        for shard in rows.sharded.addressable_shards:
            number = devices.index(shard.device)
            arrays = {VALUES: rows.sharded, **rows.sharded_slots}
            held = shard_addresses(self._plan, based(self._stack), number, copies=False)
            yield from self._by_table({n: _on(a, shard.device) for n, a in arrays.items()}, held, DEVICE.format(number))
        if jax.process_index() == 0:
            arrays = {VALUES: rows.replicated, **rows.replicated_slots}
            held = replicated_addresses(self._plan, based(self._stack))
            yield from self._by_table({n: a.addressable_shards[0].data for n, a in arrays.items()}, held, REPLICATED)

    def _by_table(self, arrays: Mapping[str, jax.Array], held: np.ndarray, folder: str) -> Iterator[Piece]:
        """The pieces of arrays, by table; ``held`` has the address of each line."""
        order = np.argsort(held, kind="stable")
        bounds = np.searchsorted(held, [*self._stack.bases, self._stack.rows], sorter=order)
        for table, base, begin, stop in zip(self._stack.tables, self._stack.bases, bounds, bounds[1:], strict=False):
            if stop > begin:
                lines = order[begin:stop]
                yield _Lines(table.name, held[lines] - base, int(stop - begin), folder, lines, arrays)


@dataclasses.dataclass
class _Lines:
    """The rows in some lines of a device's arrays; see ``jrec.checkpoint.sources.Piece``."""

    table: str
    rows: np.ndarray
    count: int
    folder: str
    lines: np.ndarray
    arrays: Mapping[str, jax.Array]

    def begin(self, start: int, stop: int) -> dict[str, jax.Array]:
        return gathered(self.arrays, self.lines[start:stop])

    def finish(self, begun: dict[str, jax.Array], start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(array)[: stop - start] for name, array in begun.items()}


def saved_rows(
    saved: Saved, layout: EmbeddingLayout, plan: Plan, mesh: Mesh, optimizer: RowOptimizers | None
) -> dict[str, MeshRows]:
    """The planned stacks of a checkpoint, each device's rows read and put there piece by piece.

    Args:
      saved: The checkpoint, written on one device or on a mesh.
      layout: The tables.
      plan: Where rows live now.
      mesh: The devices.
      optimizer: One row optimizer for all rows, or one for each stack; None to read no slots.

    Raises:
      CheckpointError: If it is damaged or has other tables.
    """
    return {
        stack.name: saved_stack(saved, stack, plan, mesh, optimizer_of(optimizer, stack.name))
        for stack in layout.planned_stacks
    }


def saved_stack(saved: RowSource, stack: Stack, plan: Plan, mesh: Mesh, optimizer: RowOptimizer | None) -> MeshRows:
    """One planned stack; see ``saved_rows``."""
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


def _on(array: jax.Array, device: Any) -> jax.Array:
    return next(shard.data for shard in array.addressable_shards if shard.device == device)
