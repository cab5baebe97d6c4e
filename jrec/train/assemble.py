"""Makes the trainer of a configuration and its dataset: places every row, and opens the source of batches."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from jrec.batch import Batch
from jrec.data.growing_tables import GrowingTables
from jrec.ops.layout import EmbeddingLayout
from jrec.run.batches import Batches
from jrec.run.feed import Feed
from jrec.run.feeds import open_feed
from jrec.run.in_place_feed import HostCasts
from jrec.run.mesh_feed import MeshFeed
from jrec.run.mesh_host_rows import with_host_rows
from jrec.run.mesh_setup import MeshSetup
from jrec.run.state import RunState
from jrec.run.trainer import Trainer
from jrec.train.build import build_modules, parameter_counts, table_key
from jrec.train.config import TrainConfig
from jrec.train.dataset import RunData
from jrec.train.fae_data import FaeLoaders
from jrec.train.host_pipeline import reads_in_place
from jrec.train.hot_cold_feed import HotColdFeed
from jrec.train.loaders import train_batches
from jrec.train.open_mesh import open_mesh
from jrec.train.report.logs import log_growth
from jrec.train.run_folder import TRACE_FILE
from jrec.train.tables import vocabularies_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembled:
    """A run that is ready to begin.

    Attributes:
      trainer: Takes the run's steps.
      setup: Mesh and plan; None on one device without a plan.
      total: Steps of the run.
      parameters: Counts and bytes, see ``parameter_counts``.
      hot_cold: The run's batches where hot and cold ones are apart; None otherwise.
    """

    trainer: Trainer
    setup: MeshSetup | None
    total: int
    parameters: dict[str, dict[str, Any]]
    hot_cold: HotColdFeed | None


def assemble(
    data: RunData, layout: EmbeddingLayout, folder: pathlib.Path, *, restored: bool, first_step: int = 0
) -> Assembled:
    """Makes all of a run but its log and its checkpoints.

    Args:
      data: The run's dataset and configuration.
      layout: The run's tables.
      folder: The run's folder.
      restored: Whether a checkpoint will be restored: then no initial values are made.
      first_step: Steps that the optimizer took before the run.

    Raises:
      ConfigError: If parts of the configuration do not go together, such as a run that needs the pipeline of host
        memory with ``tables.host.pipeline`` "off".
      DatasetError: If the dataset cannot be used.
      PlanError: If the plan does not fit.
    """
    config, schema = data.config, data.schema
    in_place = reads_in_place(config, layout)
    setup = open_mesh(config, schema, layout, packed=data.packed) if config.planned else None
    loaders = batches = None
    peers = None if setup is None else setup.peers_growing
    growing = GrowingTables(layout, vocabularies_of(config, schema), peers=peers)
    if data.packed is not None:
        assert setup is not None  # separate hot rows need a plan
        loaders = FaeLoaders(config, data.packed, cold=setup, hot=setup.for_hot_batches())
        total = loaders.total_batches
    else:
        transform: Callable[[Batch], Any] | None = None if setup is None else setup.parts
        if in_place and config.data.cast == "device":
            transform = HostCasts(layout.host_stacks)
        batches, total = train_batches(config, schema, layout, growing, transform=transform)
    total = min(total, config.max_steps) if config.max_steps else total
    model, optimizer = build_modules(config, schema, layout, total, first_step=first_step, abstract=restored)
    parameters = parameter_counts(model)
    if setup is not None:
        parameters = with_host_rows(parameters, layout, setup.plan)
    saves = config.checkpoint.every_steps > 0 or config.checkpoint.keep_best
    places: dict[str, Any] = {"key": table_key(config), "host": config.tables.host, "setup": setup}
    run = RunState(model, optimizer, **places, saves=saves, growing=growing)
    hot_cold = None
    if loaders is not None:
        cold = (
            None if loaders.cold is None else _feed(config, loaders.cold, run, loaders.cold.total_batches or 0, folder)
        )
        hot = None
        if loaders.hot is not None:
            grown = functools.partial(log_growth, folder)
            total_hot = loaders.hot.total_batches or 0
            hot = MeshFeed(loaders.hot, setup=loaders.hot_setup, total=total_hot, on_growth=grown)
        feed: Feed = HotColdFeed(loaders, hot=hot, cold=cold)
        hot_cold = feed
    else:
        assert batches is not None
        feed = _feed(config, batches, run, total, folder, in_place=in_place)
    trainer = Trainer(run, feed)
    return Assembled(trainer=trainer, setup=setup, total=total, parameters=parameters, hot_cold=hot_cold)


def _feed(
    config: TrainConfig, batches: Batches, run: RunState, total: int, folder: pathlib.Path, *, in_place: bool = False
) -> Feed:
    return open_feed(
        run,
        batches,
        host=config.tables.host,
        in_place=in_place,
        total=total,
        trace=folder / TRACE_FILE if config.log.trace else None,
        on_growth=functools.partial(log_growth, folder),
    )
