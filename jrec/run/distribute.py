"""``jrec.distribute``: places a model and its optimizer over devices and host memory."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jrec.data.growing import GrowingVocabulary
from jrec.data.growing_tables import GrowingTables
from jrec.data.packing import CastPlace
from jrec.errors import ConfigError
from jrec.json_values import JsonMapping
from jrec.mesh.route import AXIS
from jrec.nn import SparseOptimizer
from jrec.nn.optimizer import SparseModel
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import SlotShape
from jrec.run.identity import Description
from jrec.run.options import HostOptions, MeshOptions
from jrec.run.placement.model_rows import ModelRows, without_rows
from jrec.run.placement.monitor import monitor_of
from jrec.run.placement.plan import check_tables, placed_plan
from jrec.run.placement.setup import MeshSetup, connected
from jrec.run.record import record_of
from jrec.run.run import Run
from jrec.run.state import RunState
from jrec.sharding.of_layout import SlotShapes
from jrec.sharding.plans import Plan


def distribute(
    model: SparseModel,
    optimizer: SparseOptimizer,
    *,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    everywhere: Mapping[str, np.ndarray] | None = None,
    key: jax.Array | None = None,
    mesh_options: MeshOptions | None = None,
    host: HostOptions | None = None,
    growing: Mapping[str, GrowingVocabulary] | None = None,
    cast: CastPlace | None = None,
    training: bool = True,
    saves: bool = False,
    description: Description | None = None,
    factory: str | None = None,
    options: JsonMapping | None = None,
) -> Run:
    """Places a model's tables, and takes its steps from there on: on one device or many, with rows in host memory.

    On a mesh dense parameters and tensor-train cores are on all devices, every device computes its part of a batch, and
    every row lives where the plan says. With several processes each one calls this, and all methods of the run, in
    the same order, after ``jax.distributed.initialize``.

      >>> run = jrec.distribute(model, optimizer)
      >>> step = run.compile()
      >>> for batch in run.feed(batches, dense=["price"]):
      ...     loss, outputs = step(batch)

    Args:
      model: A ``SparseModel``. The run takes its arrays, which ``step`` then updates in place: read them with
        ``Run.modules``. Tables larger than a device's memory are of tier "host", or in a layout with ``planned=True``,
        so that the model does not hold their rows. A model may be abstract (``nnx.eval_shape``) where a checkpoint
        will be restored.
      optimizer: The model's optimizer.
      mesh: The devices, whatever its axes; None for JAX's first device.
      plan: Where the rows live, such as from ``jrec.sharding.plan``. None deals them to the mesh's devices in turn, and
        leaves them on the one device without a mesh. Tables of tiers "host" and "replicated" are there as a whole.
      everywhere: By table, ascending rows that every device has, whatever the plan says: the hot rows of FAE.
      key: The key of initial rows that the model does not hold; None for the one that its embeddings remember.
      mesh_options: How rows travel between devices.
      host: How rows in host memory are kept and travel.
      growing: By table that grows, its vocabulary, of as many rows as the table. ``feed`` then takes values (integers
        or texts) for it, gives new ones rows, and takes rows from old ones; ``predict`` only looks them up.
      cast: Where the cast of a batch is computed: "host" in the threads that pack, "none" leaves it to the device; None
        where the step runs.
      training: False to predict only: rows have no slots, and plans for inference are accepted.
      saves: Whether checkpoints will be written while steps go on: what reads rows for them is then compiled at once.
      description: What checkpoints record of the run beside its tables, JSON. A checkpoint that has one of its keys
        with another value is refused.
      factory: The function that made the model, as "package.module:function", so that `jrec eval`, `predict`,
        `export`, `compress` and ``init_from`` read the run's checkpoints: docs/library.md. ``DLRM`` and ``TBSM`` need
        none.
      options: The factory's own keyword arguments, in JSON types.

    Raises:
      ConfigError: If plan, mesh and tables do not go together, a table that grows is a tensor train or frozen,
        ``host.pipeline`` is "off", but the run needs it, or ``training`` is false after steps of an exact optimizer.
      PlanError: If the devices cannot hold the plan.
      ProcessError: If another process cannot be reached.
    """
    host, layout, made = host or HostOptions(), model.embeddings.layout, model
    if optimizer.has_tail and not training:
        taken = optimizer.dense.step.get_value()
        if not isinstance(taken, jax.ShapeDtypeStruct) and int(taken):
            raise ConfigError(
                f"an exact optimizer took {int(taken):,} steps on the model, whose rows are read with its slots, but"
                " training=False lets these go; leave it out, or restore a checkpoint into a model made anew"
            )
        model.embeddings.exact = False  # a checkpoint's rows are made current when they are read
    cast = cast or ("host" if jax.default_backend() == "cpu" else "none")
    # Read now: the model gives its arrays to the run, whose steps donate them.
    first_key: jax.Array = model.embeddings.table_key() if key is None else key
    held: ModelRows | None = None
    setup: MeshSetup | None = None
    if mesh is not None or plan is not None or everywhere is not None or layout.planned:
        devices = np.array(jax.devices()[:1]) if mesh is None else mesh.devices.reshape(-1)
        if not layout.planned:
            model, optimizer, held = without_rows(model, optimizer)
            layout = model.embeddings.layout
        if plan is not None:
            _check_plan(plan, layout, len(devices), training=training)
        slots = _slots(layout, optimizer) if training else None
        placed = placed_plan(plan, layout, len(devices), slots, everywhere=_checked_rows(layout, everywhere or {}))
        setup = MeshSetup(
            layout=layout,
            mesh=Mesh(devices, (AXIS,)),
            plan=placed,
            options=mesh_options or MeshOptions(),
            cast=cast == "host",
            training=training,
            monitor=None if plan is None or not training else monitor_of(layout, placed, plan),
        )
        setup = connected(setup, growing=bool(growing))
    elif jax.process_count() > 1:
        raise ConfigError(
            f"{jax.process_count()} processes run, but distribute was given no mesh; give one of all devices:"
            " jax.make_mesh((jax.device_count(),), ('devices',))"
        )
    state = RunState(
        model,
        optimizer,
        key=first_key,
        host=host,
        setup=setup,
        held=held,
        training=training,
        saves=saves,
        growing=GrowingTables(layout, growing or {}, peers=None if setup is None else setup.peers_growing),
    )
    record = None if description else record_of(made, first_key, factory=factory, options=options)
    return Run(state, model, optimizer, host=host, cast=cast, description=description or {}, record=record)


def _slots(layout: EmbeddingLayout, optimizer: SparseOptimizer) -> SlotShapes:
    """The slots of each table's rows, which take memory."""
    stacks = {table.name: stack.name for stack in layout.planned_stacks for table in stack.tables}

    def of_table(table: str) -> Mapping[str, SlotShape]:
        return {} if (own := optimizer.of(stacks[table])) is None else own.slots

    return of_table


def _checked_rows(layout: EmbeddingLayout, everywhere: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows that every device has, by table.

    Raises:
      ConfigError: If there is no such table or row, or rows do not ascend.
    """
    checked = {}
    sizes = {table.name: table.table_rows for stack in layout.planned_stacks for table in stack.tables}
    for name, given_rows in everywhere.items():
        rows = np.asarray(given_rows)
        rows = (
            rows.astype(np.int64) if np.issubdtype(rows.dtype, np.integer) else rows
        )  # unsigned ones would not descend
        if name not in sizes:
            raise ConfigError(f"everywhere names table {name!r}; uncompressed are {', '.join(sorted(sizes))}")
        fits = rows.ndim == 1 and (not rows.size or np.issubdtype(rows.dtype, np.integer))
        if not fits or (np.diff(rows) <= 0).any() or (rows.size and not 0 <= rows[0] <= rows[-1] < sizes[name]):
            raise ConfigError(f"everywhere[{name!r}] must be ascending rows of 0 to {sizes[name] - 1:,}; sort them")
        checked[name] = rows
    return checked


def _check_plan(plan: Plan, layout: EmbeddingLayout, devices: int, *, training: bool) -> None:
    if plan.devices != devices:
        raise ConfigError(
            f"the plan is for {plan.devices} devices, but the mesh has {devices}; plan for {devices}, or give a mesh of"
            f" {plan.devices}"
        )
    if training and plan.purpose != "training":
        raise ConfigError(f"the plan is for {plan.purpose}: its copies of rows would not follow the updates")
    check_tables(plan, layout)
