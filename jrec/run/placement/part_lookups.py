"""What one device's part of a batch reads of a planned stack, counted on the host for a run's first batches.

Devices find rows by themselves (``jrec.mesh.routing``). From some batches a run learns what they have room for, and
whether lookups are sent; counts of later batches may differ.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.mesh.routing import ON_HOST, WindowCapacity
from jrec.ops.layout import Stack, StackedFeature
from jrec.ops.types import Bags
from jrec.sharding.stack_ranges import StackRanges


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartLookups:
    """The lookups of a part of a batch in one stack, without padding, and where the device reads their rows.

    Attributes:
      device: The part's device.
      devices: The devices of the mesh.
      bag: (n,) int64, each lookup's bag, ascending.
      number: (n,) int64, its unique row.
      addresses: (m,) unique rows, ascending.
      source: (m,) int64, the device whose shard has the row; the number of devices for the replicated array, one more
        for host memory.
      offset: (m,) int64, the row's offset there.
    """

    device: int
    devices: int
    bag: np.ndarray
    number: np.ndarray
    addresses: np.ndarray
    source: np.ndarray
    offset: np.ndarray

    @staticmethod
    def of(bags: Bags, ranges: StackRanges, *, device: int, devices: int) -> PartLookups:
        """The lookups of bags of NumPy arrays."""
        ids = np.asarray(bags.ids)
        if bags.offsets is None:
            bag = np.repeat(np.arange(ids.shape[0]), ids.shape[1])
        else:
            bag = np.repeat(np.arange(bags.num_bags), np.diff(np.asarray(bags.offsets)))
        # Behind the last offset of ragged bags is padding, which is in no bag.
        ids = ids.reshape(-1)[: bag.size]
        addresses, number = np.unique(ids[ids >= 0], return_inverse=True)
        source, offset = ranges.located(addresses, device)
        return PartLookups(
            device=device,
            devices=devices,
            bag=bag[ids >= 0],
            number=number,
            addresses=addresses,
            source=source,
            offset=offset,
        )

    @property
    def owner(self) -> np.ndarray:
        """(m,) int64, the other device whose shard has each unique row; -1 for the device's own rows and the host's."""
        return np.where((self.source < self.devices) & (self.source != self.device), self.source, -1)

    def sent(self, sending: np.ndarray | None) -> np.ndarray:
        """(n,) bool, which lookups are sent to the rows' owners.

        Args:
          sending: (num_bags,) bool, the bags whose lookups of other devices' rows are sent; None for none.
        """
        if sending is None:
            return np.zeros(self.number.size, bool)
        return sending[self.bag] & (self.owner >= 0)[self.number]

    def sends(self, sending: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """How many lookups, and bags of these, are sent to each device: (devices,) int64 each."""
        sent = self.sent(sending)
        owner = self.owner[self.number[sent]]
        # Each owner pools its rows of a bag into one sum, so a bag counts once for an owner, however many lookups it
        # sends.
        bag_and_owner = np.unique(self.bag[sent] * self.devices + owner)
        lookups, bags = (
            np.bincount(devices, minlength=self.devices) for devices in (owner, bag_and_owner % self.devices)
        )
        return lookups, bags

    def retrieved(self, sending: np.ndarray | None = None) -> np.ndarray:
        """(m,) bool, which unique rows some lookup reads that is not sent."""
        read = np.zeros(self.addresses.size, bool)
        read[self.number[~self.sent(sending)]] = True
        return read

    def needs(
        self, sending: np.ndarray | None = None, read: np.ndarray | None = None, brought: np.ndarray | None = None
    ) -> WindowCapacity:
        """The room that the part needs.

        Args:
          sending: See ``sent``.
          read: (h,) ascending addresses of rows of host memory, which include the part's; None where there are none.
          brought: (h,) int64, the device that has each of them while the batch lasts.
        """
        source = self.source
        if read is not None and brought is not None:
            source, on_host = source.copy(), source == self.devices + ON_HOST
            source[on_host] = brought[np.searchsorted(read, self.addresses[on_host])]
        # Two sources more than devices: the replicated array, and host memory.
        counts = np.bincount(source[self.retrieved(sending)], minlength=self.devices + 2)
        lookups, bags = self.sends(sending)
        return WindowCapacity(
            unique=int(counts.sum()),
            own=int(counts[self.device]),
            remote=int(np.delete(counts[: self.devices], self.device).max(initial=0)),
            replicated=int(counts[self.devices]),
            lookups=int(lookups.max()),
            bags=int(bags.max()),
        )


def bags_of(feature: StackedFeature, examples: int) -> slice:
    """A feature's bags in a batch of ``examples`` examples."""
    first = feature.first_bag * examples
    return slice(first, first + feature.config.bags_per_example * examples)


def poolable(stack: Stack) -> list[StackedFeature]:
    """The features whose bags are (weighted) sums of uncompressed rows, of which each owner can pool its part."""
    return [] if stack.compressed else [f for f in stack.features if not f.config.unpooled]
