"""The feed for the places of a run's rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jrec.run.batches import Batches
from jrec.run.feed import Feed, LoaderFeed
from jrec.run.host_feed import HostFeed
from jrec.run.in_place_feed import InPlaceFeed
from jrec.run.mesh_feed import MeshFeed
from jrec.run.mesh_setup import MeshSetup
from jrec.run.options import HostOptions
from jrec.run.state import RunState


def open_feed(
    run: RunState,
    batches: Batches,
    *,
    host: HostOptions,
    setup: MeshSetup | None,
    in_place: bool = False,
    total: int | None = None,
    trace: pathlib.Path | None = None,
    on_growth: Callable[[int, Mapping[str, Any]], None] = lambda step, grown: None,
) -> Feed:
    """The feed of a run's batches.

    Args:
      run: The run's state.
      batches: On a mesh cut by ``setup.parts``; with casts of the stacks in host memory where rows stay in place.
      host: How rows in host memory travel.
      setup: The run's mesh and plan, which may be that of hot batches (``for_hot_batches``); None without.
      in_place: Whether rows in host memory do not travel (``reads_in_place``).
      total: The number of batches that the run takes; None for all.
      trace: Where to write the trace of the stages of rows in host memory; None for none.
      on_growth: See ``MeshFeed``.
    """
    if setup is not None and (setup.hot or not run.tables):
        return MeshFeed(batches, setup=setup, total=total, on_growth=on_growth)
    if not run.tables:
        return LoaderFeed(batches)
    if in_place:
        return InPlaceFeed(
            batches, tables=run.tables, total=total, frozen=run.frozen, trace=trace, first_rows=run.first_rows
        )
    return HostFeed(
        batches,
        layout=run.layout,
        tables=run.tables,
        host=host,
        total=total,
        trace=trace,
        setup=setup,
        first_rows=run.first_rows,
    )
