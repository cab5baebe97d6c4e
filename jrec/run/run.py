"""``jrec.distribute``: a model and its optimizer over devices and host memory, and the loop around them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrec.batch import Batch
from jrec.checkpoint import Checkpoints
from jrec.data.blocks import LABEL
from jrec.data.packing import OnBadId, Packer
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.mesh.route import AXIS
from jrec.nn import SparseOptimizer, binary_cross_entropy
from jrec.nn.optimizer import Loss
from jrec.ops.layout import EmbeddingLayout
from jrec.run.batches import PackedBatches
from jrec.run.checkpoint import dense_arrays, restore_state
from jrec.run.feed import Feed, Ready
from jrec.run.feeds import open_feed
from jrec.run.held import HeldRows, without_rows
from jrec.run.in_place_feed import HostCasts, needs_pipeline
from jrec.run.mesh_batch import Dealt
from jrec.run.mesh_feed import MeshFeed
from jrec.run.mesh_plan import check_tables, placed_plan
from jrec.run.mesh_setup import MeshSetup, open_setup
from jrec.run.options import HostOptions, MeshOptions
from jrec.run.predictions import Predictions
from jrec.run.processes import wait_for_all
from jrec.run.state import RunState
from jrec.run.step import Seen, StepOn
from jrec.run.whole_tables import read_rows, table_rows
from jrec.sharding.plans import Plan

Step = Callable[["FedBatch"], tuple[jax.Array, Seen]]


def distribute(
    model: Any,
    optimizer: SparseOptimizer,
    *,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    everywhere: Mapping[str, np.ndarray] | None = None,
    key: jax.Array | None = None,
    mesh_options: MeshOptions | None = None,
    host: HostOptions | None = None,
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

    Raises:
      ConfigError: If plan, mesh and tables do not go together, or ``host.pipeline`` is "off", but the run needs it.
      PlanError: If the devices cannot hold the plan.
      ProcessError: If another process cannot be reached.
    """
    host, layout = host or HostOptions(), model.embeddings.layout
    first_key: jax.Array = model.embeddings.table_key() if key is None else key
    held: HeldRows | None = None
    setup: MeshSetup | None = None
    if mesh is not None or plan is not None or everywhere is not None or layout.planned:
        devices = np.array(jax.devices()[:1]) if mesh is None else mesh.devices.reshape(-1)
        if not layout.planned:
            model, optimizer, held = without_rows(model, optimizer)
            layout = model.embeddings.layout
        if plan is not None:
            _check_plan(plan, layout, len(devices))
        slots = {table.name: stack.name for stack in layout.planned_stacks for table in stack.tables}

        def slots_of(table: str) -> Mapping[str, Any]:
            return {} if (own := optimizer.of(slots[table])) is None else own.slots

        placed = placed_plan(plan, layout, len(devices), slots_of, everywhere=_checked_rows(layout, everywhere or {}))
        options = mesh_options or MeshOptions()
        setup = open_setup(layout, Mesh(devices, (AXIS,)), placed, options=options)
    elif jax.process_count() > 1:
        raise ConfigError(
            f"{jax.process_count()} processes run, but distribute was given no mesh; give one of all devices:"
            " jax.make_mesh((jax.device_count(),), ('devices',))"
        )
    return Run(
        RunState(model, optimizer, key=first_key, host=host, setup=setup, held=held), model, optimizer, host=host
    )


def _checked_rows(layout: EmbeddingLayout, everywhere: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The rows that every device has, by table.

    Raises:
      ConfigError: If there is no such table or row, or rows do not ascend.
    """
    checked = {}
    sizes = {table.name: table.rows for stack in layout.planned_stacks for table in stack.tables}
    for name, given_rows in everywhere.items():
        rows = np.asarray(given_rows)
        if name not in sizes:
            raise ConfigError(f"everywhere names table {name!r}; uncompressed are {', '.join(sorted(sizes))}")
        fits = rows.ndim == 1 and (not rows.size or np.issubdtype(rows.dtype, np.integer))
        if not fits or (np.diff(rows) <= 0).any() or (rows.size and not 0 <= rows[0] <= rows[-1] < sizes[name]):
            raise ConfigError(f"everywhere[{name!r}] must be ascending rows of 0 to {sizes[name] - 1:,}; sort them")
        checked[name] = rows
    return checked


def _check_plan(plan: Plan, layout: EmbeddingLayout, devices: int) -> None:
    if plan.devices != devices:
        raise ConfigError(
            f"the plan is for {plan.devices} devices, but the mesh has {devices}; plan for {devices}, or give a mesh of"
            f" {plan.devices}"
        )
    if plan.purpose != "training":
        raise ConfigError(f"the plan is for {plan.purpose}: its copies of rows would not follow the updates")
    check_tables(plan, layout)


@dataclasses.dataclass(frozen=True, eq=False)
class FedBatch:
    """A batch of a ``RunFeed``, ready for one step.

    Attributes:
      batch: The examples as they were packed, NumPy arrays; with several processes, this process's.
    """

    batch: Batch
    _ready: Ready
    _feed: RunFeed


class RunFeed:
    """Batches of a run, packed and routed in threads ahead of their steps; an iterator. Use it from one thread.

    ``Run.feed`` makes it. Take the step of a batch before you ask for the next one.
    """

    def __init__(self, feed: Feed):
        self._feed, self._out, self._closed = feed, False, False

    def __iter__(self) -> Iterator[FedBatch]:
        return self

    def __next__(self) -> FedBatch:
        if self._closed:
            raise StopIteration
        if self._out:
            raise RuntimeError("take the step of the last batch before you ask for the next one: rows depend on it")
        try:
            ready = self._feed.next()
        except StopIteration:
            self._feed.settle()
            self.close()
            raise
        self._out = True
        return FedBatch(ready.batch, ready, self)

    def position(self) -> Any:
        """The position after the last step, in JSON types, for ``Run.save`` and ``Run.feed(..., position=...)``."""
        return self._feed.position()

    def settle(self) -> None:
        """Waits until host memory holds every row as the last step left it."""
        if not self._closed:
            self._feed.settle()

    def close(self) -> None:
        """Ends the threads; a feed whose batches are all taken is closed."""
        if not self._closed:
            self._closed = True
            self._feed.close()

    def __enter__(self) -> RunFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        self.close()


class Run:
    """A model in training, wherever its rows live; ``distribute`` makes it. Use it from one thread.

    Attributes:
      layout: The tables.
      mesh: The devices; None for one without a plan.
      plan: Where the rows of planned tables live; None without a mesh and a plan.
      steps: The number of steps taken.
    """

    def __init__(self, state: RunState, model: Any, optimizer: SparseOptimizer, *, host: HostOptions):
        self._state, self._host = state, host
        self.layout = state.layout
        self.mesh, self.plan = (None, None) if state.setup is None else (state.setup.mesh, state.setup.plan)
        embeddings = model.embeddings
        reason = needs_pipeline(planned=self.plan is not None, implementation=embeddings.implementation)
        if host.pipeline == "off" and reason is not None:
            raise ConfigError(f"HostOptions.pipeline is 'off', but {reason}; leave it at 'auto'")
        self._in_place = bool(self.layout.host_stacks) and host.pipeline != "on" and reason is None
        self._fingerprint = _fingerprint(self.layout, optimizer)
        self._feeds: weakref.WeakSet[RunFeed] = weakref.WeakSet()
        self._checkpoints: Checkpoints | None = None
        self._predictions = Predictions(state)
        step = optimizer.dense.step.get_value()
        self.steps = 0 if isinstance(step, jax.ShapeDtypeStruct) else int(step)

    def compile(self, *, loss: Loss = binary_cross_entropy) -> Step:
        """A jitted step, in place on the run's arrays: lookup, gradients, update of dense parameters and rows.

        Args:
          loss: A function of what the model's ``logits`` returns and the batch, a mean over the batch's examples
            (``batch.mask`` is 0 where there is none). On a mesh it sees a device's part of the batch, and the
            parts' losses count by their examples; what it compares across examples, as in-batch negatives, it compares
            within a part.

        Returns:
          A function of a batch of ``feed`` to the loss, () float32, and the step's outputs: of all devices' examples,
          ``logits`` before the step, ``labels``, ``mask``. They are computed while the program goes on.
        """
        step_on = self._state.compiled.with_loss(loss)
        return lambda batch: self._take(batch, step_on)

    def _take(self, batch: FedBatch, step_on: StepOn) -> tuple[jax.Array, Seen]:
        feed = batch._feed
        if feed not in self._feeds or not feed._out:
            raise ValueError("a step takes a batch of this run's feed, and each batch once")
        if self._checkpoints is not None:
            self._checkpoints.between_steps()
        host, outputs = self._state.step(batch._ready, step_on)
        feed._feed.stepped(batch._ready, host, outputs)
        feed._out = False
        self.steps += 1
        return outputs.loss, outputs

    def feed(
        self,
        batches: Iterable[Any],
        *,
        dense: Sequence[str] = (),
        label: str | None = LABEL,
        batch_size: int | None = None,
        hot: bool = False,
        on_bad_id: OnBadId = "raise",
        workers: int = 2,
        prefetch: int = 2,
        position: Any = None,
        **packing: Any,
    ) -> RunFeed:
        """Batches for steps, from any iterable of examples; packed, routed and prefetched in threads.

        Args:
          batches: Yields columns as ``jrec.data.pack_batch`` takes them, or packed batches (``jrec.data.Loader``). With
            several processes each gives its own part of every batch, all parts of one size, equally many of them.
          dense: Names of the float features, in the order the model takes them.
          label: Name of the labels, or None to fill them with 0.
          batch_size: The static number of examples of a batch; fewer are padded. None for as many as the first has,
            and in any case a multiple of the devices that share them.
          hot: Whether the batches read only rows that every device has by the plan (FAE's hot batches), so that no row
            travels. Another batch is refused.
          on_bad_id: See ``pack_batch``.
          workers: Threads that pack; 0 for none.
          prefetch: Packed batches that may wait.
          position: Where to go on, from ``RunFeed.position``: an iterator with a state, as grain's, is moved there; of
            others give what follows.
          **packing: Further arguments of ``pack_batch``.

        Raises:
          ConfigError: If ``hot``, but there is no plan.
        """
        setup = self._state.setup
        if hot and setup is None:
            raise ConfigError("hot batches read the rows that every device has by a plan; give distribute a plan")
        setup = dataclasses.replace(setup, hot=True) if hot and setup is not None else setup
        transform: Callable[[Batch], Any] | None = None
        if setup is not None:
            transform = functools.partial(_hot_parts, setup) if hot else setup.parts
        if self._in_place:
            transform = HostCasts(self.layout.host_stacks)
        cast = "host" if setup is None else "none"
        packer = Packer(self.layout, dense=dense, label=label, on_bad_id=on_bad_id, cast=cast, **packing)
        shared = 1 if setup is None else sum(number in setup.local for number in setup.plan.askers)
        pack = _Pack(packer, batch_size, shared)
        packed = PackedBatches(batches, pack, transform=transform, workers=workers, prefetch=prefetch, look=pack.look)
        if hot and setup is not None:
            feed: Feed = MeshFeed(packed, setup=setup, total=None)
        else:
            feed = open_feed(self._state, packed, host=self._host, in_place=self._in_place)
        if position is not None:
            feed.restore(position)
        opened = RunFeed(feed)
        self._feeds.add(opened)
        return opened

    def predict(
        self,
        columns: Any,
        *,
        dense: Sequence[str] = (),
        batch_size: int | None = None,
        on_bad_id: OnBadId = "raise",
        **packing: Any,
    ) -> Any:
        """What the model's ``logits`` returns for some examples, NumPy arrays; every process gives the same examples.

        Args:
          columns: As ``pack_batch`` takes them, without labels.
          dense: Names of the float features, in the order the model takes them.
          batch_size: How many examples are predicted at once, to compile one program for any number; None for all.
          on_bad_id: See ``pack_batch``.
          **packing: Further arguments of ``pack_batch``.
        """
        self._settle()
        packer = Packer(self.layout, dense=dense, label=None, on_bad_id=on_bad_id, **packing)
        prepared = packer.prepare(columns)
        size = batch_size or max(1, prepared.examples)
        parts = []
        for begin in range(0, max(1, prepared.examples), size):
            chosen = np.arange(begin, min(begin + size, prepared.examples), dtype=np.int32)
            logits = self._predictions.of_batch(packer.pack(prepared, chosen, size))
            parts.append(jax.tree.map(lambda array, count=chosen.size: np.asarray(array)[:count], logits))
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    def table(self, name: str) -> np.ndarray:
        """All rows of a table as the last step left them, (rows, dim); see ``rows``."""
        return self.rows(name, np.arange(table_rows(self.layout, name)))

    def rows(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows of a table as the last step left them, wherever they live; every process gets them.

        Args:
          name: The table.
          ids: (n,) integers.

        Returns:
          (n, dim) of the table's dtype; float32 of tensor-train tables.

        Raises:
          ValueError: If there is no such table or row.
        """
        self._settle()
        return read_rows(self._state, name, np.asarray(ids, None if len(ids) else np.int64))

    @property
    def host_tables(self) -> Mapping[str, HostTable]:
        """The rows in host memory, by stack, such as how many of them take memory: ``num_made``, ``nbytes``."""
        return dict(self._state.tables)

    def modules(self) -> tuple[Any, SparseOptimizer]:
        """Model and optimizer as the last step left them; planned rows are not in them.

        The next step takes their arrays, so that they are to be read before it.
        """
        self._settle()
        return self._state.modules()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        meta: Mapping[str, Any] | None = None,
        keep: int = 2,
        wait: bool = True,
    ) -> None:
        """Writes a checkpoint of this step to FOLDER/STEP: dense parameters, rows, slots; docs/checkpoints.md.

        Further checkpoints in the folder hold only what changed. A run on any mesh and plan can restore it.

        Args:
          folder: A folder for the run's checkpoints, which every process sees.
          meta: Further information in JSON types, such as the feed's position; ``restore`` returns it.
          keep: How many checkpoints stay there.
          wait: Whether to return only when it is complete; on one device it can be written while steps go on.

        Raises:
          CheckpointError: If it cannot be written.
        """
        self._settle()
        target = pathlib.Path(folder).absolute()
        if self._checkpoints is None or self._checkpoints.folder != target:
            self._finish()
            self._checkpoints = self._open(target, keep)
        about = {"meta": json.loads(json.dumps(dict(meta or {}))), "forms": self._forms()}
        state = self._state
        arrays = dense_arrays(state.state, {}, self.layout)
        wait = wait or state.waits_for_checkpoints
        self._checkpoints.save(self.steps, arrays=arrays, sources=state.sources(), meta=about, wait=wait)

    def restore(self, folder: str | os.PathLike[str], *, step: int | None = None) -> dict[str, Any]:
        """Reads a checkpoint of ``save``, by a run on any mesh and plan; the steps after it have the same bits.

        Args:
          folder: The folder of the checkpoints.
          step: Which; None for the latest.

        Returns:
          What ``save`` was given as ``meta``.

        Raises:
          CheckpointError: If there is none, or it is damaged, or of another model.
          RuntimeError: If a feed of the run is open: it has read ahead of rows that change now.
        """
        if any(not feed._closed for feed in self._feeds):
            raise RuntimeError("close the run's feeds before a checkpoint is restored, and make new ones after it")
        self._finish()
        self._checkpoints = self._open(pathlib.Path(folder).absolute(), keep=2)
        saved = self._checkpoints.open(step)
        state, _ = restore_state(saved, self._state.state, self.layout)
        self._state.restore(saved, state)
        if (setup := self._state.setup) is None:
            self._checkpoints.restored(saved)
        elif (send := saved.manifest.meta.get("forms")) is not None:
            setup.forms.settle(send)
        self.steps = saved.step
        return dict(saved.manifest.meta["meta"])

    def close(self) -> None:
        """Ends all threads; a checkpoint under way is completed first."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._state.setup.close if self._state.setup is not None else lambda: None)
            for feed in list(self._feeds):
                stack.callback(feed.close)
            stack.callback(self._finish)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, folder: pathlib.Path, keep: int) -> Checkpoints:
        return Checkpoints(folder, keep=keep, fingerprint=self._fingerprint, barrier=wait_for_all)

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.finish()
            self._checkpoints = None

    def _settle(self) -> None:
        for feed in self._feeds:
            feed.settle()

    def _forms(self) -> list[str] | None:
        """The features whose lookups are sent, where that is decided."""
        setup = self._state.setup
        return None if setup is None or not setup.forms.decided else sorted(setup.forms.send)


class _Pack:
    """Packs the items of a feed into batches of one size."""

    def __init__(self, packer: Packer, batch_size: int | None, shared: int):
        self._packer, self._size, self._shared = packer, batch_size, shared

    def look(self, item: Any) -> None:
        """Sees the items in their order: the first one has the size of all, unless it was given."""
        if self._size is None and not isinstance(item, Batch):
            self._size = self._packer.prepare(item).examples

    def __call__(self, item: Any) -> Batch:
        if isinstance(item, Batch):
            return item
        prepared = self._packer.prepare(item)
        size = -(-(self._size or prepared.examples) // self._shared) * self._shared
        return self._packer.pack(prepared, np.arange(prepared.examples, dtype=np.int32), size)


def _hot_parts(setup: MeshSetup, batch: Batch) -> Dealt:
    """The parts of a batch that may read only rows of every device.

    Raises:
      DatasetError: If it reads another row.
    """
    dealt = setup.parts(batch)
    for part in dealt.parts:
        for name, routed in part.routes.items():
            everywhere = np.zeros(routed.addresses.size, bool)
            everywhere[routed.of(setup.plan.devices)[1]] = True
            if everywhere.all():
                continue
            stack, address = setup.layout.stacks[name], int(routed.addresses[~everywhere][0])
            number = int(np.searchsorted(stack.bases, address, side="right")) - 1
            raise DatasetError(
                f"a hot batch reads row {address - stack.bases[number]} of table {stack.tables[number].name!r}, which"
                " the plan does not put on every device; give such examples to a feed without hot=True"
            )
    return dealt


def _fingerprint(layout: EmbeddingLayout, optimizer: SparseOptimizer) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that restores it."""
    tables: dict[str, Any] = {}
    for stack in layout.members:
        own = optimizer.of(stack.name)
        for table in stack.tables:
            shape = table.tt_shape
            described: dict[str, Any] = {"rows": table.rows, "dim": table.dim, "dtype": table.dtype}
            described["optimizer"] = "frozen" if own is None else type(own).__name__
            if shape is not None:
                described |= {"row_factors": list(shape.row_factors), "dim_factors": list(shape.dim_factors)}
                described["ranks"] = list(shape.ranks)
            tables[f"{table.name}[{table.first_row}:]" if table.first_row else table.name] = described
    return {"tables": tables}
