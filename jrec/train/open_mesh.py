"""The mesh and the plan of a configured run."""

from __future__ import annotations

from jrec.data.fae import FaeManifest
from jrec.data.schema import Schema
from jrec.ops.layout import EmbeddingLayout
from jrec.run.mesh_monitor import monitor_of
from jrec.run.mesh_rows import make_mesh
from jrec.run.mesh_setup import MeshSetup, open_setup
from jrec.sharding import load_plan
from jrec.train.config import TrainConfig
from jrec.train.run_plan import check_sharing, run_plan


def open_mesh(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    *,
    training: bool = True,
    packed: FaeManifest | None = None,
) -> MeshSetup:
    """The mesh and the plan of a run.

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables' layout.
      training: False to predict only: rows have no slots, and plans for inference are accepted.
      packed: Hot and cold examples, whose hot rows every device has.

    Raises:
      ConfigError: If there are too few devices, they cannot share a batch, or the run cannot train on a mesh.
      PlanError: If the plan does not fit.
      ProcessError: If another process of the run cannot be reached.
    """
    mesh = make_mesh(max(1, config.mesh.devices))
    slots = config.optimizer.embedding.slots if training else None
    plan = run_plan(config, schema, layout, slots, packed=packed)
    check_sharing(config, layout, plan, [d.process_index for d in mesh.devices.flat], training=training)
    watched = training and config.plan and layout.planned_stacks
    monitor = monitor_of(layout, plan, load_plan(config.plan)) if watched else None
    cast = config.data.cast == "host"
    options = {"options": config.mesh, "cast": cast, "training": training, "monitor": monitor}
    return open_setup(layout, mesh, plan, **options, growing=bool(schema.growing))
