"""How the unique rows of a batch reach the device that reads them, and the arrays of a stack on a mesh.

A device routes what its part of a batch reads of one stack (``jrec.mesh.routing``), or a window of it: U *unique rows*,
numbered by the ascending order of their addresses, each of which lies in the replicated array, in the device's own
shard, or in another device's shard. A row in host memory has an owner among the devices, too: for a batch, the owner's
shard of S rows is followed by its K rows from host memory that any device reads. On a mesh every leaf here has a
leading axis of devices, sharded over the mesh; ``local_view`` takes it off inside ``shard_map``. Symbols: N devices, S
rows of a shard, H replicated rows, C requests from one device to another, K rows of a device from host memory. All of
them but K are at least 1, by padding where need be: XLA crashes on CPUs when a program of several devices reads an
array without elements.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jrec.ops.row_optimizers import RowOptimizer, Slots

AXIS = "devices"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherMap:
    """Rows to read from one array, and the place of each among the unique rows of a batch.

    Attributes:
      rows: int32 offsets in the array, unique, of any shape; padding holds the array's number of rows or more.
      at: int32 of the same shape, places among the U unique rows; padding holds U. Each place that is not padding
        occurs exactly once in all picks of a route.
    """

    rows: jax.Array
    at: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SendRoute:
    """One device's lookups in the shards of all devices, grouped into bags by shard; see ``jrec.mesh.send``.

    Attributes:
      rows: (N, L) int32 offsets in each device's shard, bag by bag; padding, behind them, is -1.
      starts: (N, P) int32, where each bag of a line begins in it; padding holds the line's number of lookups.
      at: (N, P) int32, the number of each bag among this device's bags, unique in a line; padding holds ``num_bags``.
      weights: (N, L) float32, or None for ones.
      addresses: (N, L) int32, the rows' addresses in the stack, for stochastic rounding; or None.
      num_bags: The number of this device's bags.
    """

    rows: jax.Array
    starts: jax.Array
    at: jax.Array
    weights: jax.Array | None = None
    addresses: jax.Array | None = None
    num_bags: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """Where the unique rows of one stack, in one device's part of a batch, come from.

    Attributes:
      capacity: U, how many unique rows fit: the static size of the result of ``retrieve``.
      replicated: (R,) rows of the replicated array.
      own: (O,) rows of the device's own shard; None where no row of the stack is sharded or in host memory.
      remote: (N, C) rows of each device's shard: line j is asked of device j. A device's own line is padding. None
        where nothing is ever asked, since all lookups of other devices' rows are sent.
      send: Lookups that are sent to the rows' owners, which pool them; None where all unique rows are retrieved.
      addresses: (U,) int32, the unique rows' addresses in the stack, anything in padding; read only where 16-bit rows
        are rounded stochastically, which goes by table and row, wherever the row lives. None otherwise.
    """

    capacity: int = dataclasses.field(metadata={"static": True})
    replicated: GatherMap
    own: GatherMap | None
    remote: GatherMap | None
    send: SendRoute | None = None
    addresses: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRows:
    """The arrays of one stack on a mesh, or one device's view of them inside ``shard_map``.

    Attributes:
      sharded: (N * S, dim), lines ``j * S`` to ``(j + 1) * S`` on device j; (S, dim) inside ``shard_map``.
        ``Plan.locate`` gives offsets in them; a device's last rows may be padding, which nothing reads.
      replicated: (H, dim), equal on all devices; its last rows may be padding.
      sharded_slots: The slots that ``optimizer.init(sharded)`` makes, placed alike; empty in inference.
      replicated_slots: The replicated rows' slots; empty in inference.
      host: (N * K, dim), rows of a batch from host memory, whose offsets follow the shards' own; (K, dim) inside
        ``shard_map``. None where no row of the stack lives there.
      host_slots: Slots of the rows from host memory; empty in inference.
    """

    sharded: jax.Array
    replicated: jax.Array
    sharded_slots: Slots = dataclasses.field(default_factory=dict)
    replicated_slots: Slots = dataclasses.field(default_factory=dict)
    host: jax.Array | None = None
    host_slots: Slots = dataclasses.field(default_factory=dict)

    @property
    def shard_rows(self) -> int:
        """S + K, the rows of the device's shard and the batch's rows from host memory."""
        return self.sharded.shape[0] + (0 if self.host is None else self.host.shape[0])

    @staticmethod
    def specs(optimizer: RowOptimizer | None, *, host: bool = False) -> MeshRows:
        """The placement: the same structure with a ``PartitionSpec`` for every array.

        Args:
          optimizer: The optimizer that made the slots; None without slots.
          host: Whether there are a batch's rows from host memory.
        """
        # A slot lies where its row lies, whatever its shape: the first axis is the rows'.
        names = () if optimizer is None else tuple(optimizer.slots)

        def placed(spec: Any) -> tuple[Any, dict[str, Any]]:
            return spec, dict.fromkeys(names, spec)

        sharded, sharded_slots = placed(PartitionSpec(AXIS))
        replicated, replicated_slots = placed(PartitionSpec())
        return MeshRows(
            sharded=sharded,
            replicated=replicated,
            sharded_slots=sharded_slots,
            replicated_slots=replicated_slots,
            host=sharded if host else None,
            host_slots=dict(sharded_slots) if host else {},
        )


def check_view(rows: MeshRows, route: Route) -> None:
    """Raises ValueError where one device's arrays or route do not have the documented shapes."""
    dim = rows.sharded.shape[-1]
    for name, array in (("sharded", rows.sharded), ("replicated", rows.replicated)):
        if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] != dim:
            raise ValueError(f"{name} rows must be (rows, {dim}) and at least one, but have shape {array.shape}")
    for name in ("replicated", "own", "remote"):
        picks = getattr(route, name)
        if picks is None:
            continue
        ndim = 2 if name == "remote" else 1
        shapes, types = {picks.rows.shape, picks.at.shape}, {picks.rows.dtype.name, picks.at.dtype.name}
        if len(shapes) > 1 or picks.rows.ndim != ndim or types != {"int32"}:
            raise ValueError(
                f"rows and places of {name} must be int32 of one shape of {ndim} dimension(s) inside shard_map, but are"
                f" {sorted(types)} of {sorted(shapes)}; local_view takes the axis of devices off"
            )
        if picks.rows.size == 0:
            raise ValueError(f"the route has no place for {name} rows; give it at least one of padding")


def local_view[T](tree: T) -> T:
    """The leaves without their first axis, of one device: a device's view of a batch inside ``shard_map``."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), tree)
