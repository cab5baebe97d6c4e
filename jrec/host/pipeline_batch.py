"""The items that travel through the host pipeline: a batch, its plan, and its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.host.ring import Rows, bucket, head
from jrec.host.table import HostTable, local_ids
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import Stack
from jrec.ops.types import Bags, Cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackReads:
    """One stack's part in one batch.

    Attributes:
      rows: (n,) of the stack's ``address_dtype``, the unique rows, ascending.
      source: (capacity,) int32, where each row comes from; see ``RingIndex.next``.
      missing: (m,) of the rows' dtype, the rows to fetch.
    """

    rows: np.ndarray
    source: np.ndarray
    missing: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRows:
    """The unique rows of one stack that a batch reads from host memory.

    Attributes:
      addresses: (n,) of the stack's ``address_dtype``, ascending.
      most: The largest possible ``n``; the same for all batches of a pipeline.
      room: The static number of rows in which they reach the device, which never shrinks; None for one that grows with
        only this process's batches.
    """

    addresses: np.ndarray
    most: int
    room: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch whose unique rows are known.

    Attributes:
      batch: The batch as the pipeline's caller sees it, NumPy arrays.
      sent: The part of it that goes to the device, a tree of NumPy arrays.
      rows: The batch's unique rows, by stack of the pipeline.
    """

    batch: Batch
    sent: PyTree
    rows: dict[str, BatchRows]


class Preparation(Protocol):
    """Makes a batch that numbers its unique rows from an item of the source, and sends it to the device."""

    def prepare(self, item: Any) -> Prepared:
        """Prepares the next batch; called in the order of the batches, by one thread."""
        ...

    def send(self, sent: PyTree) -> PyTree:
        """``Prepared.sent`` on the device."""
        ...


class WholeBatches:
    """Batches whose ids number the unique rows of the whole batch, for one device.

    Args:
      stacks: The stacks with rows in host memory, by name.
      to_device: Moves a tree of arrays to the device.
    """

    def __init__(self, stacks: Mapping[str, Stack], to_device: Callable[[PyTree], PyTree]):
        self._stacks, self._to_device = dict(stacks), to_device

    def prepare(self, item: Batch) -> Prepared:
        """Numbers the batch's unique rows; see ``Preparation``."""
        bags, rows = dict(item.bags), {}
        for name, stack in self._stacks.items():
            bags[name], unique, most = localized(bags[name], stack)
            rows[name] = BatchRows(addresses=unique, most=most)
        batch = dataclasses.replace(item, bags=bags)
        return Prepared(batch=batch, sent=batch, rows=rows)

    def send(self, sent: PyTree) -> PyTree:
        """The batch on the device; see ``Preparation``."""
        return self._to_device(sent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocatedBatch:
    """A batch that was read, and whose rows' places are known.

    Attributes:
      batch: NumPy arrays; from ``WholeBatches``, ids of host stacks number their unique rows (see ``localized``).
      sent: See ``Prepared``.
      position: The source's position after this batch, for ``HostPipeline.position``.
      reads: The rows to read, by host stack.
    """

    batch: Batch
    sent: PyTree
    position: Any
    reads: dict[str, StackReads]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathered:
    """A located batch with the rows that come from the host, by stack, padded to a bucket."""

    located: LocatedBatch
    fetched: dict[str, Rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transferred:
    """A batch on the device, with the fetched rows and the sources of all rows."""

    located: LocatedBatch
    batch: PyTree
    fetched: dict[str, Rows]
    sources: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A batch to take a step with.

    Attributes:
      number: The batch's number, from 0 where the pipeline began.
      batch: ``Prepared.sent`` on the device; from ``WholeBatches``, ids of host stacks number the rows of ``tables``,
        and casts name the stacks' own rows (see ``localized``).
      tables: The current values of each host stack's unique rows, (capacity, dim), with their slots; the capacity
        rarely grows.
      located: The batch on the host, and where its rows are.
    """

    number: int
    batch: PyTree
    tables: dict[str, Rows]
    located: LocatedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updated:
    """A batch's rows after its step, on the device.

    Attributes:
      located: The batch, and where its rows are.
      rows: The updated rows, by stack.
      returning: The rows that the host will store, on their way to it, by stack.
      dispatched: When the step was dispatched, in seconds of ``time.perf_counter``.
    """

    located: LocatedBatch
    rows: dict[str, Rows]
    returning: dict[str, Rows]
    dispatched: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved:
    """The rows that the host stores after a batch's step, NumPy arrays."""

    located: LocatedBatch
    rows: dict[str, Rows]


def localized(bags: Bags, stack: Stack) -> tuple[Bags, np.ndarray, int]:
    """Bags whose ids number the batch's unique rows, 0 for the least, and those rows.

    Their cast, computed here unless the loader did, is the cast of the original ids: ``rows`` names rows of the stack,
    modulo 2^32 in int32 (rounding counts modulo 2^32, too), so that all of it can go to a device.

    Args:
      bags: NumPy arrays.
      stack: The stack that the bags read.

    Returns:
      The bags; the unique rows, (n,) of the stack's ``address_dtype``, ascending; and the largest possible ``n``.
    """
    cast = with_cast(bags, stack, threads=None).cast
    assert cast is not None
    # Before ``on_device`` makes int32 of them: host memory is read at whole addresses.
    rows = np.asarray(cast.rows)
    local = dataclasses.replace(bags, ids=local_ids(cast, bags.ids.shape), cast=on_device(cast))
    return local, rows[: int(cast.num_unique)], rows.size


def on_device(cast: Cast) -> Cast:
    """A cast of NumPy arrays without int64: int64 rows, which only host tables have, become int32 modulo 2^32."""
    rows: Any = np.asarray(cast.rows).astype(np.int32, copy=False)
    return cast if rows is cast.rows else dataclasses.replace(cast, rows=rows)


def fetched(table: HostTable, rows: np.ndarray, capacity: int) -> Rows:
    """Rows of a host table with their slots, NumPy arrays, zeros behind them up to a bucket.

    Args:
      table: The table, which is only read.
      rows: (n,) int32 or int64, ascending.
      capacity: The largest possible ``n``.
    """
    # Few sizes, so that few programs are compiled.
    size = bucket(rows.size, capacity)

    def space(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        out = np.empty((size, *shape), dtype)
        # Only the padding: the rows themselves are about to be written.
        out[rows.size :] = 0
        return out

    values = space((table.dim,), table.dtype)
    slots = {
        name: space((table.dim,) if shape == "element" else (), np.dtype(np.float32))
        for name, shape in table.optimizer.slots.items()
    }
    table.fetch(rows, values[: rows.size], {name: slot[: rows.size] for name, slot in slots.items()})
    return Rows(values=values, slots=slots)


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def transfers(
    device: Any, *, pinned: bool | None = None
) -> tuple[Callable[[PyTree], PyTree], Callable[[Rows, int], Rows]]:
    """Functions that move arrays to a device, and that begin to move a batch's first rows back while it computes.

    On the way there the runtime stages NumPy arrays in its own page-locked memory. On the way back a bucket of rows
    goes to the device's ``pinned_host`` memory, in one copy that waits only for the step. On a CPU rows stay in place.

    Args:
      device: One of ``jax.devices()``.
      pinned: Whether rows come back through ``pinned_host`` memory; None does so on accelerators that have it.
    """
    here = jax.sharding.SingleDeviceSharding(device)
    if pinned is None:
        kinds = {memory.kind for memory in device.addressable_memories()}
        pinned = device.platform != "cpu" and "pinned_host" in kinds
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host") if pinned else None

    def begin_return(rows: Rows, count: int) -> Rows:
        if there is None and device.platform == "cpu":
            return rows
        # A program a bucket, so that few shapes are compiled and little padding travels.
        first = head(rows, bucket(count, rows.values.shape[0]))
        return first if there is None else jax.device_put(first, there)

    return lambda tree: jax.device_put(tree, here), begin_return
