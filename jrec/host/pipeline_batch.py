"""What travels through the host pipeline: a batch, its plan, and its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jrec.batch import Batch
from jrec.host.local import local_ids
from jrec.host.ring import Rows, bucket, head
from jrec.host.table import HostTable
from jrec.native import host as native
from jrec.ops.layout import Stack
from jrec.ops.types import Bags, Cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """One stack's part in one batch.

    Attributes:
      rows: (n,) of the stack's ``address_dtype``, the unique rows, ascending.
      source: (capacity,) int32, where each comes from; see ``RingPlan.next``.
      missing: (m,) of the rows' dtype, those to fetch.
    """

    rows: np.ndarray
    source: np.ndarray
    missing: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRows:
    """The unique rows of one stack that a batch reads from host memory.

    Attributes:
      addresses: (n,) of the stack's ``address_dtype``, ascending.
      most: How large ``n`` could be; the same for all batches of a pipeline.
      room: The static number of rows in which they reach the device, which never shrinks; None for one that grows with
        the batches of this process alone.
    """

    addresses: np.ndarray
    most: int
    room: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch whose unique rows are known.

    Attributes:
      batch: NumPy arrays, as the pipeline's caller sees it.
      sent: what goes to the device of it, a tree of NumPy arrays.
      rows: By stack of the pipeline its unique rows.
    """

    batch: Batch
    sent: Any
    rows: dict[str, BatchRows]


class Preparation(Protocol):
    """How what the source yields becomes a batch that numbers its unique rows, and reaches the device."""

    def prepare(self, item: Any) -> Prepared:
        """Prepares the next batch; called in the order of the batches, by one thread."""
        ...

    def send(self, sent: Any) -> Any:
        """``Prepared.sent`` on the device."""
        ...


class WholeBatches:
    """Batches whose ids number the unique rows of the whole batch, for one device.

    Args:
      stacks: whose rows are in host memory.
      to_device: of a tree of arrays.
    """

    def __init__(self, stacks: Mapping[str, Stack], to_device: Callable[[Any], Any]):
        self._stacks, self._to_device = dict(stacks), to_device

    def prepare(self, item: Batch) -> Prepared:
        """See ``Preparation``."""
        bags, rows = dict(item.bags), {}
        for name, stack in self._stacks.items():
            bags[name], unique, most = localized(bags[name], stack)
            rows[name] = BatchRows(addresses=unique, most=most)
        batch = dataclasses.replace(item, bags=bags)
        return Prepared(batch=batch, sent=batch, rows=rows)

    def send(self, sent: Any) -> Any:
        """See ``Preparation``."""
        return self._to_device(sent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A batch that was read and planned.

    Attributes:
      batch: NumPy arrays; of ``WholeBatches``, the ids of host stacks number their unique rows (see ``localized``).
      sent: see ``Prepared``.
      position: of the source behind this batch, for ``HostPipeline.position``.
      plans: by host stack.
    """

    batch: Batch
    sent: Any
    position: Any
    plans: dict[str, StackPlan]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathered:
    """A planned batch with the rows that come from the host, by stack, padded to a bucket."""

    planned: Planned
    fetched: dict[str, Rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transferred:
    """A batch on the device: itself, the fetched rows, and the sources of all rows."""

    planned: Planned
    batch: Any
    fetched: dict[str, Rows]
    sources: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A batch to take a step with.

    Attributes:
      number: counted from 0, where the pipeline began.
      batch: ``Prepared.sent`` on the device; of ``WholeBatches``, ids of host stacks number the rows of ``tables``, and
        casts name those of the stacks (see ``localized``).
      tables: by host stack its unique rows as of now, (capacity, dim), with their slots; a capacity that grows is rare.
      planned: the batch on the host, and its plan.
    """

    number: int
    batch: Any
    tables: dict[str, Rows]
    planned: Planned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updated:
    """A batch's rows after its step, on the device.

    Attributes:
      planned: the batch and its plan.
      rows: by stack.
      returning: those of them that the host stores, on their way to it.
      dispatched: when the step was, in seconds of ``time.perf_counter``.
    """

    planned: Planned
    rows: dict[str, Rows]
    returning: dict[str, Rows]
    dispatched: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved:
    """The rows that the host stores after a batch's step, NumPy arrays."""

    planned: Planned
    rows: dict[str, Rows]


def localized(bags: Bags, stack: Stack) -> tuple[Bags, np.ndarray, int]:
    """Bags whose ids number the batch's unique rows, 0 for the least, and those rows.

    Their cast, computed here unless the loader did, is that of the ids as they were: ``rows`` names rows of the stack,
    modulo 2^32 in int32, which is what rounding hashes, so that all of it can go to a device.

    Args:
      bags: NumPy arrays.
      stack: which they read.

    Returns:
      The bags; (n,) of the stack's ``address_dtype``, ascending; and how large ``n`` could be.
    """
    cast: Cast | None = bags.cast
    if cast is None:
        ids, offsets = np.asarray(bags.ids), None if bags.offsets is None else np.asarray(bags.offsets)
        cast = native.tensor_cast(ids, offsets, num_rows=stack.rows)
    rows = np.asarray(cast.rows)
    local = dataclasses.replace(bags, ids=local_ids(cast, bags.ids.shape), cast=on_device(cast))
    return local, rows[: int(cast.num_unique)], rows.size


def on_device(cast: Cast) -> Cast:
    """A cast of NumPy arrays without int64: such rows, of tables that only the host addresses, modulo 2^32 in int32."""
    rows: Any = np.asarray(cast.rows).astype(np.int32, copy=False)
    return cast if rows is cast.rows else dataclasses.replace(cast, rows=rows)


def fetched(table: HostTable, rows: np.ndarray, capacity: int) -> Rows:
    """Rows of a host table with their slots, NumPy arrays, zeros behind them up to a bucket.

    Args:
      table: which is only read.
      rows: (n,) int32 or int64, ascending.
      capacity: the largest ``n`` there can be.
    """
    size = bucket(rows.size, capacity)

    def space(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        out = np.empty((size, *shape), dtype)
        out[rows.size :] = 0
        return out

    values = space((table.dim,), table.dtype)
    slots = {
        name: space((table.dim,) if shape == "element" else (), np.dtype(np.float32))
        for name, shape in table.optimizer.slots.items()
    }
    table.fetch(rows, values[: rows.size], {name: slot[: rows.size] for name, slot in slots.items()})
    return Rows(values=values, slots=slots)


def tree_bytes(tree: Any) -> int:
    """Of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def transfers(device: Any, *, pinned: bool | None = None) -> tuple[Callable[[Any], Any], Callable[[Rows, int], Rows]]:
    """How arrays reach a device, and how the first of a batch's rows begin their way back while it computes.

    On the way there the runtime stages NumPy arrays in page-locked memory of its own. On the way back a bucket of rows
    goes to the device's ``pinned_host`` memory, in one copy that waits for nothing but the step. On a CPU there is no
    way to go.

    Args:
      device: one of ``jax.devices()``.
      pinned: whether it has such memory and gains by it; None for accelerators that have it.
    """
    here = jax.sharding.SingleDeviceSharding(device)
    if pinned is None:
        kinds = {memory.kind for memory in device.addressable_memories()}
        pinned = device.platform != "cpu" and "pinned_host" in kinds
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host") if pinned else None

    def begin_return(rows: Rows, count: int) -> Rows:
        if there is None and device.platform == "cpu":
            return rows
        first = head(rows, bucket(count, rows.values.shape[0]))
        return first if there is None else jax.device_put(first, there)

    return lambda tree: jax.device_put(tree, here), begin_return
