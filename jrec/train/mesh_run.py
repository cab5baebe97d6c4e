"""Runs on a mesh: from configuration and dataset to a stepper of the training loop."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.checkpoint import Saved
from jrec.checkpoint.sources import Source
from jrec.data.loader import Loader
from jrec.data.regroup import blank, gathered
from jrec.data.schema import Schema
from jrec.errors import ConfigError, value_errors_are_config_errors
from jrec.mesh.exchange import Kind, check_kind, fastest_kind
from jrec.nn import SparseOptimizer
from jrec.ops.layout import EmbeddingLayout
from jrec.sharding import Plan, load_plan
from jrec.train.config import TrainConfig
from jrec.train.logs import log_growth
from jrec.train.mesh_ahead import BatchesAhead, described
from jrec.train.mesh_arrays import MeshBatch, Shapes, on_mesh, stacked
from jrec.train.mesh_batch import Dealt, Parts, host_stacks
from jrec.train.mesh_checkpoint import MeshSource, saved_rows
from jrec.train.mesh_dense import settled
from jrec.train.mesh_evaluate import MeshPredictions, agreed
from jrec.train.mesh_forms import Forms
from jrec.train.mesh_monitor import PlanMonitor, monitor_of
from jrec.train.mesh_plan import check_sharing, planned_stacks, run_plan
from jrec.train.mesh_rows import initial_rows, local_numbers, make_mesh
from jrec.train.mesh_step import Seen, State, compile_mesh

if TYPE_CHECKING:
    from jrec.train.mesh_host import MeshHostStepper

_FIRST_BATCHES = 4
"""From so many the forms of lookups are chosen, and the first sizes of routes settled, before the first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSetup:
    """What a run on a mesh knows before it has a model.

    Attributes:
      config: of the run.
      layout: of the tables.
      mesh: of the devices.
      plan: where the rows of planned tables live.
      monitor: of the plan's cost, where `jrec plan` made it.
      training: whether rows have slots.
    """

    config: TrainConfig
    layout: EmbeddingLayout
    mesh: Mesh
    plan: Plan
    monitor: PlanMonitor | None = None
    training: bool = True

    @functools.cached_property
    def local(self) -> list[int]:
        """Numbers of the process's own devices."""
        return local_numbers(self.mesh)

    @property
    def host(self) -> bool:
        """Whether some rows lie in host memory."""
        return bool(host_stacks(self.layout, self.plan))

    @functools.cached_property
    def forms(self) -> Forms:
        """Which features' lookups are sent, once that is decided: all that can, where some devices only keep tables."""
        chosen = self.config.mesh.form
        return Forms(self.layout, "send" if chosen == "auto" and self.plan.computes is not None else chosen)

    @property
    def exchange(self) -> Kind:
        """How rows and sums travel."""
        chosen, platform = self.config.mesh.exchange, self.mesh.devices.flat[0].platform
        return fastest_kind(platform) if chosen == "auto" else chosen

    @functools.cached_property
    def parts(self) -> Parts:
        """Cuts this process's training batches."""
        return self._parts(self.local, self.local[0], len(self.local))

    @functools.cached_property
    def all_parts(self) -> Parts:
        """Cuts batches that every process reads whole."""
        return self._parts(range(self.plan.devices), 0, self.plan.devices)

    def _parts(self, devices: Any, first: int, count: int) -> Parts:
        cast = self.config.data.cast == "host"
        return Parts(self.layout, self.plan, devices=devices, first=first, count=count, cast=cast, forms=self.forms)

    def shapes(self, examples: int) -> Shapes:
        """Static sizes for batches of so many examples."""
        each = examples // len(self.plan.askers)
        return Shapes(
            self.layout,
            self.plan,
            examples=each,
            headroom=self.config.mesh.headroom,
            send=self.forms.send,
        )

    def decide_forms(self, loader: Loader) -> None:
        """Chooses the forms of lookups by the first batches of the run, wherever it stands; once.

        Args:
          loader: of the training batches, cut into parts or whole.
        """
        if self.forms.decided:
            return
        batches: list[Any] = [loader.batch(n) for n in range(min(_FIRST_BATCHES, loader.total_batches or 0))]
        dealt = [found if isinstance(found, Dealt) else self.parts(found) for found in batches]
        self.forms.decide([of.parts for of in dealt], self.local)

    def decide_forms_without(self, batch: Batch) -> None:
        """The same where nothing was trained, by a batch to predict, which every process gives whole."""
        if not self.forms.decided:
            self.forms.decide([self.all_parts(batch).parts], range(self.plan.devices), training=False)

    def everywhere(self, tree: Any) -> Any:
        """Arrays that every process has, on all devices; of abstract ones, where they will be."""
        sharding = NamedSharding(self.mesh, PartitionSpec())

        def place(leaf: Any) -> jax.Array | jax.ShapeDtypeStruct:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

        return jax.tree.map(place, tree)


def open_mesh(config: TrainConfig, schema: Schema, layout: EmbeddingLayout, *, training: bool = True) -> MeshSetup:
    """The mesh and the plan of a run.

    Args:
      config: of the run.
      schema: of the dataset.
      layout: of the tables.
      training: False to predict only: rows come without slots, and plans for inference are taken.

    Raises:
      ConfigError: if there are too few devices, they cannot share a batch, or something does not train on a mesh.
      PlanError: if the plan does not fit.
    """
    devices = config.mesh.devices
    mesh = make_mesh(devices)
    if config.mesh.exchange != "auto":
        with value_errors_are_config_errors("mesh.exchange"):
            check_kind(config.mesh.exchange, mesh.devices.flat[0].platform)
    slots = config.optimizer.embedding.slots if training else None
    plan = run_plan(config, schema, layout, slots)
    check_sharing(config, layout, plan, [d.process_index for d in mesh.devices.flat], training=training)
    if (rows := plan.rows_in("host")) and (processes := jax.process_count()) > 1:
        raise ConfigError(
            f"the plan keeps {rows:,} rows of tables in host memory, which one process updates, but this is one of"
            f" {processes}; plan with --no-host, more memory, or --tt"
        )
    watched = training and config.plan and planned_stacks(layout)
    monitor = monitor_of(layout, plan, load_plan(config.plan)) if watched else None
    return MeshSetup(config=config, layout=layout, mesh=mesh, plan=plan, monitor=monitor, training=training)


def mesh_stepper(
    model: Any,
    optimizer: SparseOptimizer,
    loader: Loader | None,
    *,
    setup: MeshSetup,
    folder: pathlib.Path,
    total: int,
) -> MeshStepper | MeshHostStepper:
    """The stepper of a run on a mesh, with rows in host memory or without; arguments as of ``MeshStepper``."""
    if not setup.host:
        return MeshStepper(model, optimizer, loader, setup=setup, folder=folder, total=total)
    from jrec.train.host_run import host_tables
    from jrec.train.mesh_host import MeshHostStepper
    from jrec.train.mesh_host_rows import planned_host_tables

    mesh = MeshStepper(model, optimizer, None, setup=setup, folder=folder, total=total)
    tables = host_tables(setup.config, setup.layout, optimizer.embedding)
    slots = optimizer.embedding if setup.training else None
    planned = planned_host_tables(setup.config, setup.layout, setup.plan, slots)
    return MeshHostStepper(mesh, loader, tables=tables, total=total, folder=folder, planned=planned)


def several() -> bool:
    """Whether several processes train, each of which sees only its own part of a batch."""
    return jax.process_count() > 1


class MeshStepper:
    """Steps of a model on a mesh; see ``jrec.train.stepper.Stepper``.

    Args:
      model, optimizer: as on one device.
      loader: of the training batches, dealt by ``setup.parts``; None to predict only.
      setup: mesh and plan.
      folder: of the run.
      total: steps of the run.
    """

    def __init__(
        self,
        model: Any,
        optimizer: SparseOptimizer,
        loader: Loader | None,
        *,
        setup: MeshSetup,
        folder: pathlib.Path,
        total: int,
    ):
        self.setup, self.optimizer = setup, optimizer
        config = setup.config
        state, self.compiled = compile_mesh(
            model,
            optimizer,
            setup.mesh,
            reduce=config.mesh.reduce,
            exchange=setup.exchange,
            computes=setup.plan.computes,
            training=setup.training,
        )
        self._caught_up = None if setup.plan.computes is None else settled(setup.mesh, setup.plan.computes)
        self._row_optimizer = optimizer.embedding if setup.training else None
        self._state: State = setup.everywhere(state)
        self._behind = False
        self._rows: Any = None
        self._loader, self._total = loader, total
        self._shapes: Shapes | None = None
        self._ahead: BatchesAhead | None = None  # where several processes train
        self._step, self._folder = 0, folder
        self._evaluated: dict[int, Shapes] = {}
        self.predictions = MeshPredictions(setup, self.predict_on)

    @property
    def state(self) -> State:
        """Dense parameters and all else that every device has, equal on all of them.

        Where some devices only keep tables, their copies fall behind with every step, and get the others' here.
        """
        if self._behind and self._caught_up is not None:
            self._state, self._behind = self._caught_up(self._state), False
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self._behind = state, False

    @property
    def rows(self) -> Any:
        """Planned stacks, made when they are first wanted: a restored run makes none."""
        if self._rows is None:
            key = nnx.Rngs(params=self.setup.config.seed).params()  # the first of the stream, as in a collection
            setup = self.setup
            self._rows = initial_rows(setup.layout, setup.plan, setup.mesh, key, self._row_optimizer)
        return self._rows

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """See ``Stepper``."""
        if self._loader is None:
            raise RuntimeError("this stepper has no training batches")
        if self._shapes is None:
            self._shapes = self._settled(self._loader)
            if several():
                self._ahead = BatchesAhead(self._loader, self._shapes, self.setup.local, self._total)
        self._step += 1
        dealt, needs = self._next(self._loader, self._shapes)
        self.observe(dealt.batch)
        batch = stacked(dealt.parts, self.setup.local, self._shapes)
        self._state, seen = self.step_on(self._state, on_mesh(dataclasses.replace(batch, needs=needs), self.setup.mesh))
        self._behind = True
        if self._ahead is None:
            return seen.loss, seen.logits, dealt.batch
        self._ahead.stepped(seen.needs)
        return seen.loss, seen.logits, dataclasses.replace(dealt.batch, labels=seen.labels, mask=seen.mask)

    def _next(self, loader: Loader, shapes: Shapes) -> tuple[Dealt, Any]:
        """The next batch, which the sizes hold; and, of several processes, what a later one needs here."""
        if self._ahead is None:
            dealt: Any = next(loader)
            shapes.fit(dealt.parts, self.setup.local)
            return dealt, None
        dealt, needs, grown = self._ahead.next()
        if grown and jax.process_index() == 0:
            log_growth(self._folder, self._step, described(grown))
        return dealt, needs

    def observe(self, batch: Batch) -> None:
        """Lets the plan's monitor see a batch."""
        if self.setup.monitor is not None:
            self.setup.monitor.observe(batch)

    def forms(self) -> dict[str, Any] | None:
        """The forms of lookups, and the bytes that decided (``Forms.record``); None where there was no choice."""
        if self._loader is not None:
            self.setup.decide_forms(self._loader)
        return self.setup.forms.record()

    def monitored(self, folder: pathlib.Path) -> dict[str, Any] | None:
        """What the plan costs under the run's accesses (``PlanMonitor.summary``); None where nothing was watched."""
        first = jax.process_index() == 0
        return self.setup.monitor.summary(folder) if self.setup.monitor is not None and first else None

    def step_on(self, state: State, batch: MeshBatch) -> tuple[State, Seen]:
        """A step of the rows, and of a state that may be another's, on a batch that is on the mesh."""
        rows, self._rows = self.rows, None
        state, self._rows, seen = self.compiled.step(state, rows, batch)
        return state, seen

    def predict_on(self, state: State, batch: MeshBatch) -> jax.Array:
        """Logits of a batch that is on the mesh."""
        return self.compiled.predict(state, self.rows, batch)

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """See ``Stepper``. Every process gives the whole batch."""
        given, count, numbers = len(batch.labels), len(self.setup.plan.askers), range(self.setup.plan.devices)
        examples = -(-given // count) * count
        if examples > given:
            more = blank(self.setup.layout, batch, examples - given)
            batch = gathered(self.setup.layout, [(batch, 0, given), (more, 0, examples - given)])
        # Every process routes all parts, so that all agree on forms and sizes.
        self.setup.decide_forms_without(batch)
        parts = self.setup.all_parts(batch).parts
        if examples not in self._evaluated:
            self._evaluated[examples] = self.setup.shapes(examples)
        shapes = self._evaluated[examples]
        shapes.fit(parts, numbers)
        mine = [parts[number] for number in self.setup.local]
        logits = self.predict_on(state, on_mesh(stacked(mine, self.setup.local, shapes), self.setup.mesh))
        return logits[:given] if examples > given else logits

    def _settled(self, loader: Loader) -> Shapes:
        """Sizes to begin with, from the run's next batches; all processes agree."""
        setup = self.setup
        setup.decide_forms(loader)
        shapes = setup.shapes(setup.config.data.batch_size)
        numbers = range(loader.position, min(loader.position + _FIRST_BATCHES, self._total))
        batches: Any = map(loader.batch, numbers)
        shapes.settle(agreed(shapes.most((dealt.parts for dealt in batches), setup.local)))
        return shapes

    def settle(self) -> None:
        """Every row is there already."""

    def position(self) -> dict[str, Any]:
        """See ``Stepper``."""
        if self._ahead is not None:
            return self._ahead.position()
        return {} if self._loader is None else self._loader.state()

    def sources(self) -> Sequence[Source]:
        """See ``Stepper``."""
        setup = self.setup
        if not (stacks := planned_stacks(setup.layout)):
            return []
        rows = self.rows
        return [MeshSource(stack, setup.plan, setup.mesh, self._row_optimizer, rows[stack.name]) for stack in stacks]

    def load(self, saved: Saved) -> None:
        """Takes the planned rows of a checkpoint, whatever plan it was made under."""
        setup = self.setup
        self._rows = saved_rows(saved, setup.layout, setup.plan, setup.mesh, self._row_optimizer)

    def restore(self, saved: Saved, state: State, position: Any) -> None:
        """See ``Stepper``."""
        self.load(saved)
        self.state, self._step = state, saved.step
        if self._loader is not None:
            self._loader.restore(position)

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """There is none."""
        del seconds

    def close(self) -> None:
        """See ``Stepper``."""
        if self._loader is not None:
            self._loader.close()
