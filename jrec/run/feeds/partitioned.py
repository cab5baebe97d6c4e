"""Batches of a mesh, made ready for their steps: parts in static sizes, and the places of their rows of host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.host.pipeline_batch import BatchRows, Prepared
from jrec.mesh.routing import AddressMap, HostAddressMap
from jrec.ops.types import Bags
from jrec.run.feeds.batches import Batches
from jrec.run.feeds.partitioned_batch import PartitionedBatch
from jrec.run.placement.host_owners import HostRead
from jrec.run.placement.peers import Peers
from jrec.run.placement.rows import on_mesh
from jrec.run.placement.setup import FIRST_BATCHES, MeshSetup
from jrec.run.placement.sizes import HostSizes, MeshSizes
from jrec.run.step import StepBatch
from jrec.sharding.contents import shard_capacity


class MeshBatches:
    """Makes batches in parts ready for the mesh, in the order of their steps; a ``Preparation`` of the host pipeline.

    Of several processes each prepares its own parts. They agree on sizes once, and where a batch reads rows of host
    memory, on these rows (``jrec.run.placement.host_owners``). Use it from one thread.

    Args:
      setup: Mesh and plan.
      whole: Whether every process prepares the same whole batches, of which it knows all rows.
      peers: The other processes; None for those that ``begin`` connects with, or none.
    """

    def __init__(self, setup: MeshSetup, *, whole: bool = False, peers: Peers | None = None):
        self._setup, self._whole, self._peers = setup, whole, peers
        self._sizes: dict[int, MeshSizes] = {}  # by the examples of a part
        self._places: dict[int, dict[str, AddressMap]] = {}
        stacks = {stack.name: stack for stack in setup.host_stacks}
        self._hosts, self._firsts = stacks, {name: shard_capacity(setup.plan, name) for name in stacks}

    def begin(self, loader: Batches, total: int | None) -> None:
        """Decides the modes of lookups, connects the processes, and makes room for what a feed's first batches need.

        Of a loader these are always the same ones: what has no room is summed in another order, and a resumed run
        must have the bits of one that was not stopped.

        Args:
          loader: The feed's batches, which no thread reads yet.
          total: How many batches the run takes; None for all.
        """
        self._setup.decide_modes(loader)
        # Modes first, by collectives of the devices: all processes are at this point, and no thread of a feed exchanges
        # yet.
        self._peers = self._setup.peers_of_feed()
        if batches := loader.first(FIRST_BATCHES if total is None else min(FIRST_BATCHES, total)):
            self._measure(batches)

    def _measure(self, batches: Sequence[PartitionedBatch]) -> None:
        """Makes room for what some batches of one size need."""
        setup, examples = self._setup, len(batches[0].parts[0].labels)
        sizes = self._sizes[examples] = setup.sizes(examples)
        # Of all processes: the static sizes of one program that all of them run.
        sizes.make_room(setup.needs(batches, sizes), self._peers)
        self._places[examples] = setup.places(sizes)

    def prepare(self, item: PartitionedBatch) -> Prepared:
        """See ``Preparation``; what is sent is a ``StepBatch``."""
        if (examples := len(item.parts[0].labels)) not in self._sizes:
            # Sizes are static and belong to a number of examples, so a batch of another size is measured by itself.
            self._measure([item])
        sizes, count = self._sizes[examples], len(self._setup.local)
        placed, peers = self._placed(item.read), None if self._whole else self._peers
        needed = {name: HostSizes(item.read[name].size, read.lines) for name, (*_, read) in placed.items()}
        # All processes grow together, also one whose own rows would fit: they run one program over all devices.
        sizes.fit_host(needed, peers)
        hosts = {
            name: self._host_places(name, item.read[name], device, line, sizes.host[name].read, count)
            for name, (device, line, _) in placed.items()
        }
        rows = {name: _rows_read(read, sizes, name, count) for name, (*_, read) in placed.items()}
        return Prepared(batch=item.batch, sent=StepBatch(batch=stacked(item.parts), hosts=hosts), rows=rows)

    def send(self, sent: StepBatch) -> StepBatch:
        """The prepared batch on the mesh; see ``Preparation``."""
        examples = sent.batch.labels.shape[1]
        return dataclasses.replace(on_mesh(sent, self._setup.mesh), places=self._places[examples])

    def close(self) -> None:
        """Ends the exchanges, even while the thread waits in one."""
        if self._peers is not None:
            self._peers.close()

    def _placed(self, read: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray, HostRead]]:
        """By stack, where the batch's rows of host memory will be."""
        owners = self._setup.owners
        if self._hosts and self._peers is not None and not self._whole:
            # In every batch, even where this process reads no row of host memory: the others wait for its round.
            return owners.placed_by_all(self._hosts, read, self._peers)
        return {name: owners.whole(stack, read[name]) for name, stack in self._hosts.items()}

    def _host_places(
        self, name: str, read: np.ndarray, device: np.ndarray, line: np.ndarray, room: int, count: int
    ) -> HostAddressMap:
        """The places of (n,) rows of host memory, the same for each of ``count`` devices."""

        def padded(values: np.ndarray, fill: int) -> Any:
            # 64 bits until the cast below, which takes a wide stack's addresses and padding modulo 2^32.
            out = np.full(room, fill, np.int64)
            out[: values.size] = values
            return np.broadcast_to(out.astype(np.int32), (count, room))

        return HostAddressMap(
            # Padding is behind every address, so that the array still ascends for the devices' binary search.
            addresses=padded(read, 2**32 - 1 if self._hosts[name].wide else 2**31 - 1),
            device=padded(device, 0),
            offset=padded(self._firsts[name] + line, 0),
        )


def _rows_read(read: HostRead, sizes: MeshSizes, name: str, devices: int) -> BatchRows:
    most, room = sizes.host_limits[name].lines * devices, sizes.host[name].lines * devices
    return BatchRows(addresses=read.addresses, most=most, room=room)


def stacked(parts: Sequence[Batch]) -> Batch:
    """Parts as one batch of NumPy arrays with an axis of devices in front; wide addresses modulo 2^32."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(_in_words(part) for part in parts))


def _in_words(part: Batch) -> Batch:
    def words(bags: Bags) -> Bags:
        ids: Any = np.asarray(bags.ids).astype(np.int32, copy=False)
        return dataclasses.replace(bags, ids=ids)

    return dataclasses.replace(part, bags={name: words(bags) for name, bags in part.bags.items()})
