"""Which process owns a row of host memory, and where a batch finds it.

Each process has its share of the rows in its own memory: blocks of addresses, dealt to the processes in turn. For one
batch a row of host memory is a row of a device's shard, after the rows that live there: of the ``n`` rows of a process
that a batch reads, in ascending order of addresses, row ``i`` is on the process's device ``i % D`` of ``D``. So
lookups, the exchange of rows, sums of gradients and updates are the same as for sharded rows, and the process that has
a row in its memory reads it from there and writes it back.

A process sees only its own part of a batch. So the processes ask each other ahead of the step (``placed_by_all``): each
sends the addresses that its part reads to the rows' owners; an owner merges the requests of the whole batch, and
answers where each row will be. Only row numbers travel between host memories; the rows themselves go from device to
device in the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jrec.ops.layout import Stack
from jrec.run.placement.peers import Peers

BLOCK_ROWS = 4096
"""Consecutive addresses of one process, at most: whole pages of memory of any row, and short enough to share the
frequent rows, which are the first of each table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRead:
    """Rows of one stack that a batch reads from the host memory of one process.

    Attributes:
      addresses: (n,) of the stack's ``address_dtype``, ascending; row ``i`` is on the process's device ``i % D``.
      lines: The most of these rows that one device has, over all processes.
    """

    addresses: np.ndarray
    lines: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOwners:
    """How processes share the rows of host memory.

    Attributes:
      processes: The number of processes.
      process: This process's number.
      devices: Devices of each process; the devices of process ``p`` are numbered from ``p * devices``.
    """

    processes: int
    process: int
    devices: int

    def of(self, stack: Stack, addresses: np.ndarray) -> np.ndarray:
        """The process that owns each of a stack's rows, (n,), by address."""
        return addresses // self._block(stack) % self.processes

    def ranges(self, stack: Stack, ranges: np.ndarray) -> np.ndarray:
        """The parts of (n, 2) ascending ranges of addresses that this process owns, (m, 2) int64."""
        if self.processes == 1 or not ranges.size:
            return ranges
        block = self._block(stack)
        begins = np.arange(self.process * block, int(ranges[-1, 1]), self.processes * block, dtype=np.int64)
        pieces = []
        for begin, stop in ranges:
            low, high = np.searchsorted(begins + block, begin, side="right"), np.searchsorted(begins, stop)
            begins_within = begins[low:high]
            pieces.append(np.stack([np.maximum(begins_within, begin), np.minimum(begins_within + block, stop)], axis=1))
        return np.concatenate(pieces)

    def whole(self, stack: Stack, read: np.ndarray) -> tuple[np.ndarray, np.ndarray, HostRead]:
        """Places the rows of a batch of which this process knows every lookup.

        Args:
          stack: The rows' stack.
          read: (n,) ascending addresses of all rows of host memory that the batch reads.

        Returns:
          (n,) int64, each row's device; (n,) int32, its line after the rows that live there; and the rows that this
          process reads.
        """
        owner = self.of(stack, read)
        # A row's rank among its owner's rows of this batch: all processes find the same, since all know every lookup.
        rank, most = np.empty(read.size, np.int64), 0
        for process in range(self.processes):
            owned = owner == process
            count = int(owned.sum())
            rank[owned], most = np.arange(count), max(most, count)
        device, line = self._places(owner, rank)
        return device, line, HostRead(addresses=read[owner == self.process], lines=-(-most // self.devices))

    def placed_by_all(
        self, stacks: Mapping[str, Stack], asked: Mapping[str, np.ndarray], peers: Peers
    ) -> dict[str, tuple[np.ndarray, np.ndarray, HostRead]]:
        """Places the rows of a batch of which this process knows only its own part.

        Args:
          stacks: The stacks with rows in host memory, by name.
          asked: By stack, (n,) ascending addresses of the rows of host memory that this process's part reads.
          peers: The other processes, which call this for the same batch.

        Returns:
          By stack, as ``whole``; ``lines`` counts only this process's devices.
        """
        owners = {name: self.of(stacks[name], read) for name, read in asked.items()}
        asks = peers.exchange(
            [[read[owners[name] == p] for name, read in asked.items()] for p in range(self.processes)]
        )
        # The batch's rows of this process, merged over all parts; a row's rank in this order decides its device and
        # line.
        own = [np.unique(np.concatenate(of_stack)) for of_stack in zip(*asks, strict=True)]
        ranks = peers.exchange(
            [[np.searchsorted(o, a).astype(np.int32) for o, a in zip(own, ask, strict=True)] for ask in asks]
        )
        partitioned = {}
        for i, (name, read) in enumerate(asked.items()):
            rank = np.empty(read.size, np.int64)
            for process, answer in enumerate(ranks):
                # Answers are in the order of the requests, which this mask selected from ``read``.
                rank[owners[name] == process] = answer[i]
            device, line = self._places(owners[name], rank)
            addresses = own[i].astype(stacks[name].address_dtype, copy=False)
            partitioned[name] = device, line, HostRead(addresses=addresses, lines=-(-addresses.size // self.devices))
        return partitioned

    def _block(self, stack: Stack) -> int:
        # A small stack has smaller blocks, about 16 a process or more, so that its frequent rows are shared, too.
        return max(1, min(BLOCK_ROWS, stack.rows // (16 * self.processes)))

    def _places(self, owner: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return owner * self.devices + rank % self.devices, (rank // self.devices).astype(np.int32)


ALONE = HostOwners(processes=1, process=0, devices=1)
"""The owners in a run of one process, which has all rows."""
