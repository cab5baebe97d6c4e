"""The run of a configuration and a dataset, for training and for predictions alike."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jrec.app.build import build_modules, described, table_key
from jrec.app.config import TrainConfig
from jrec.app.loaders import cast_place
from jrec.app.run_plan import check_plan, check_sharing
from jrec.app.run_record import Initial
from jrec.app.tables import vocabularies_of
from jrec.checkpoint import Saved
from jrec.data.fae import FaeManifest
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.ops.layout import EmbeddingLayout
from jrec.run.distribute import distribute
from jrec.run.feeds import in_place
from jrec.run.placement.rows import make_mesh
from jrec.run.run import Run
from jrec.sharding import Plan


def make_run(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    *,
    total_steps: int,
    first_step: int = 0,
    plan: Plan | None = None,
    packed: FaeManifest | None = None,
    trained_on: Identity | None = None,
    key: jax.Array | None = None,
    training: bool = True,
    abstract: bool = False,
) -> Run:
    """The run of a configuration, on its devices.

    Args:
      config: The run's configuration.
      schema: The dataset.
      layout: The tables (``build_layout``).
      total_steps: Steps over which learning rates follow ``[lr_schedule]``.
      first_step: Steps that the optimizer took before the run.
      plan: What ``config.plan`` names (``RunData.plan``); None where it names none.
      packed: Hot and cold examples, whose hot rows every device has.
      trained_on: The dataset that the run was trained on, where ``schema`` is another one to evaluate on.
      key: The key of the initial rows; None derives it from ``config.seed``.
      training: False to predict only: rows have no slots, and plans for inference are accepted.
      abstract: Whether to make no values, because a checkpoint will be loaded.

    Raises:
      ConfigError: If there are too few devices, they cannot share a batch, or parts of the configuration do not go
        together, such as a run that needs the pipeline of host memory with ``tables.host.pipeline`` "off".
      PlanError: If the plan does not fit.
      ProcessError: If another process of the run cannot be reached.
    """
    mesh = checked_mesh(config, schema, layout, plan, training=training) if config.planned else None
    if training:
        check_pipeline(config)
    model, optimizer = build_modules(config, schema, layout, total_steps, first_step=first_step, abstract=abstract)
    return distribute(
        model,
        optimizer,
        mesh=mesh,
        plan=plan,
        everywhere=None if packed is None else _hot_rows(packed, layout),
        key=table_key(config) if key is None else key,
        mesh_options=config.mesh,
        host=config.tables.host,
        growing=vocabularies_of(config, schema),
        cast=cast_place(config),
        training=training,
        saves=training and (config.checkpoint.every_steps > 0 or config.checkpoint.keep_best),
        description=described(config, schema, trained_on=trained_on),
    )


def load_initial(run: Run, initial: Initial, saved: Saved, config: TrainConfig, schema: Schema) -> None:
    """Gives a run the model, rows and optimizer of the checkpoint that it begins from (``init_from``)."""
    before = initial.record
    expected = described(config, schema, trained_on=before.dataset)
    run.load(saved, goes_on=False, dense_optimizer=before.keeps_dense_optimizer, expected=expected)


def check_pipeline(config: TrainConfig) -> None:
    """See ``jrec.run.feeds.in_place.check_pipeline``."""
    named = config.tables.implementation
    in_place.check_pipeline(
        config.tables.host,
        planned=config.planned,
        exact=config.optimizer.embedding.exact,
        implementation=None if named == "auto" else named,
        key="tables.host.pipeline",
    )


def checked_mesh(
    config: TrainConfig, schema: Schema, layout: EmbeddingLayout, plan: Plan | None, *, training: bool = True
) -> Mesh:
    """The devices of a run, once its plan fits them and they can share its batches; raises as ``make_run``."""
    mesh = make_mesh(max(1, config.mesh.devices))
    check_plan(plan, config, schema, layout, training=training)
    check_sharing(config, plan, [device.process_index for device in mesh.devices.flat], training=training)
    return mesh


def _hot_rows(packed: FaeManifest, layout: EmbeddingLayout) -> Mapping[str, np.ndarray]:
    """The hot rows of the tables that lie on a plan."""
    planned = {table.name for stack in layout.planned_stacks for table in stack.tables}
    return {name: rows for name, rows in packed.hot_rows.items() if name in planned}
