"""The feeds of a run: batches of any iterable, packed and routed for the places of the run's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jrec.batch import Batch
from jrec.data.identity import Identity
from jrec.data.loader import Loader
from jrec.data.packing import CastPlace, Packer, kept_orders
from jrec.errors import ConfigError
from jrec.run.feeds.ahead import PlacedFeed
from jrec.run.feeds.batches import Batches, PackedBatches
from jrec.run.feeds.feed import Feed, LoaderFeed
from jrec.run.feeds.host import HostFeed
from jrec.run.feeds.in_place import HostCasts, InPlaceFeed
from jrec.run.feeds.mesh import MeshFeed
from jrec.run.feeds.options import FeedOptions, PackingOptions
from jrec.run.feeds.run_feed import ItemPacker, RunFeed
from jrec.run.options import HostOptions
from jrec.run.placement.setup import MeshSetup
from jrec.run.state import RunState

Fed = tuple[tuple[str, ...], Identity | None]
"""Names of the float features of what a run was fed with, and its dataset, where that is known."""


class Feeds:
    """Opens the feeds of a run.

    Args:
      state: The run's state.
      host: How rows in host memory travel.
      in_place: Whether they do not (``reads_in_place``).
      cast: Where batches without a plan are cast.

    Attributes:
      opened: The feeds that may be open: what their steps left may not be stored yet.
      fed: What the last one was fed with.
    """

    def __init__(self, state: RunState, *, host: HostOptions, in_place: bool, cast: CastPlace):
        self._state, self._host, self._in_place = state, host, in_place
        self._cast: CastPlace = cast
        self.opened: list[RunFeed] = []
        self.fed: Fed = ((), None)

    def open(self, batches: Iterable[object], told: FeedOptions) -> RunFeed:
        """See ``Run.feed``."""
        # Closed ones go here, not when they close: until now ``flush`` and ``save`` had to ask them.
        self.opened = [feed for feed in self.opened if not feed.closed]
        if told.steps != 1 and (reason := self.one_by_one(hot=told.hot)):
            raise ConfigError(f"several steps in one dispatch need batches that only devices change, but {reason}")
        reads_ahead = bool(self._state.tables) and not (self._in_place or told.hot)
        self._check(hot=told.hot, reads_ahead=reads_ahead)
        setup = self._state.setup
        # Hot batches have a setup of their own: no exchange, no host rows, and sizes by the replicated rows alone.
        setup = setup.for_hot_batches() if told.hot and setup is not None else setup
        reader = batches.config if isinstance(batches, Loader) else told
        transform = self._transform(setup, reader.workers and reader.workers + reader.prefetch)
        # On a CPU the device's memory is the host's: a step takes NumPy arrays where they are.
        placed = told.steps != 1 or (told.workers > 0 and jax.default_backend() != "cpu")
        # Keys of growing tables get rows in the order of the batches. ``PackedBatches`` calls ``order`` in that order,
        # while a loader's threads pack several batches at a time.
        replays = isinstance(batches, Loader) and batches.packs and not self._state.growing
        if isinstance(batches, Loader):
            self.fed = (tuple(feature.name for feature in batches.schema.dense), batches.schema.identity)
        else:
            self.fed = (tuple(told.dense), None)
        if isinstance(batches, Loader) and replays:
            # The loader's own threads cut and cast: no second pool of threads that would hand batches on.
            batches.pass_through(transform)
            packed: Batches = batches
        else:
            pack = self._packer(batches, told, setup, placed=placed)
            packed = PackedBatches(
                batches, pack, transform=transform, workers=told.workers, prefetch=told.prefetch, order=pack.order
            )
        feed = self._feed(packed, told, setup, placed=placed)
        opened = RunFeed(feed, reads_ahead=reads_ahead, replays=replays)
        if told.position is not None:
            opened.restore(told.position)
        self.opened.append(opened)
        return opened

    def one_by_one(self, *, hot: bool = False) -> str:
        """Why every step takes a dispatch of its own; "" where several can share one."""
        if self._state.tables and not hot:
            return f"rows of {', '.join(self._state.tables)} are in host memory"
        return "tables of the run grow" if self._state.growing else ""

    def _check(self, *, hot: bool, reads_ahead: bool) -> None:
        if self._state.growing and (self.opened or hot):
            raise RuntimeError(
                "tables of the run grow with the order of its batches, so that it has one feed at a time, and no hot"
                " batches; take all batches of the other feed, or close it first"
            )
        if reads_ahead and any(feed.reads_ahead for feed in self.opened):
            raise RuntimeError(
                "another feed of the run reads rows in host memory ahead of its steps, which steps of this one would"
                " change; take all of its batches, or close it first"
            )
        if hot and self._state.setup is None:
            raise ConfigError("hot batches read the rows that every device has by a plan; give distribute a plan")

    def _transform(self, setup: MeshSetup | None, ahead: int) -> Callable[[Batch], Any] | None:
        """What becomes of packed batches before their steps, of which ``ahead`` may wait."""
        if setup is not None:
            return setup.partitioner
        return HostCasts(self._state.layout.host_stacks, self._state.tables, ahead) if self._in_place else None

    def _packer(
        self, batches: Iterable[object], told: FeedOptions, setup: MeshSetup | None, *, placed: bool
    ) -> ItemPacker:
        growing, orders = self._state.growing, kept_orders(told.packing.get("orders"))
        packing = PackingOptions(**{**told.packing, "orders": orders})
        if growing:
            packing["vocabularies"] = {**(packing.get("vocabularies") or {}), **growing.keys()}
        # On a mesh every device casts the bags of its own part in the step (``AddressMap.routed``): a cast of the whole
        # batch would be of no use.
        cast: CastPlace = self._cast if setup is None else "none"
        ahead = placed or setup is not None or bool(self._state.tables)
        return ItemPacker(
            Packer(
                self._state.layout,
                dense=told.dense,
                label=told.label,
                on_bad_id=told.on_bad_id,
                cast=cast,
                **packing,
            ),
            told.batch_size,
            1 if setup is None else sum(number in setup.local for number in setup.plan.compute_devices),
            growing,
            columns_wait=told.workers > 0 or placed or setup is not None,
            batches_wait=ahead and not isinstance(batches, Loader),
        )

    def _feed(self, batches: Batches, told: FeedOptions, setup: MeshSetup | None, *, placed: bool) -> Feed:
        """The feed for the places of the run's rows; ``placed`` where batches go to one device ahead of their steps."""
        state, total, trace, steps = self._state, told.total, told.trace, told.steps if placed else None
        at = steps if callable(steps) else lambda _: steps or 1
        # Hot batches read no row of host memory, whatever else the plan keeps there, so they need no pipeline.
        if setup is not None and (setup.hot or not state.tables):
            return MeshFeed(batches, setup=setup, total=total, steps=at)
        if not state.tables and steps is not None:
            return PlacedFeed(batches, total=total, steps=at)
        if not state.tables:
            return LoaderFeed(batches)
        if self._in_place:
            return InPlaceFeed(
                batches, tables=state.tables, total=total, frozen=state.frozen, trace=trace, first_rows=state.first_rows
            )
        return HostFeed(
            batches,
            layout=state.layout,
            tables=state.tables,
            host=self._host,
            total=total,
            trace=trace,
            setup=setup,
            first_rows=state.first_rows,
        )
