"""A model in training, wherever its rows live: its steps, batches, predictions, rows and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.checkpoint import Checkpoints
from jrec.data.blocks import LABEL
from jrec.data.growing import GrowingVocabulary
from jrec.data.loader import Loader
from jrec.data.packing import OnBadId, Packer, kept_orders
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.nn import SparseOptimizer, binary_cross_entropy
from jrec.nn.optimizer import Loss
from jrec.ops.layout import EmbeddingLayout
from jrec.outputs import check_output
from jrec.run.batches import PackedBatches
from jrec.run.checkpoint import dense_arrays, restore_state
from jrec.run.feed import Feed
from jrec.run.feeds import open_feed
from jrec.run.in_place_feed import HostCasts, reads_in_place
from jrec.run.mesh_feed import MeshFeed
from jrec.run.options import HostOptions
from jrec.run.predictions import Predictions
from jrec.run.processes import wait_for_all
from jrec.run.run_feed import FedBatch, ItemPacker, RunFeed, hot_parts
from jrec.run.state import RunState
from jrec.run.step import Seen, StepOn
from jrec.run.whole_tables import read_rows, table_rows

Step = Callable[[FedBatch], tuple[jax.Array, Seen]]


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
        planned, implementation = self.plan is not None, model.embeddings.implementation
        named: Any = {"planned": planned, "implementation": implementation, "key": "HostOptions.pipeline"}
        self._in_place = reads_in_place(self.layout, host, **named)
        self._fingerprint = _fingerprint(self.layout, optimizer)
        self._feeds: list[RunFeed] = []  # those that are open: what their steps left may not be stored yet
        self._checkpoints: Checkpoints | None = None
        self._predictions = Predictions(state)
        step = optimizer.dense.step.get_value()
        self.steps = 0 if isinstance(step, jax.ShapeDtypeStruct) else int(step)

    def compile(self, *, loss: Loss = binary_cross_entropy, micro_batches: int = 1) -> Step:
        """A jitted step, in place on the run's arrays: lookup, gradients, update of dense parameters and rows.

        Args:
          loss: A function of what the model's ``logits`` returns and the batch, a mean over the batch's examples
            (``batch.mask`` is 0 where there is none). On a mesh it sees a device's part of the batch, and the
            parts' losses count by their examples; what it compares across examples, as in-batch negatives, it compares
            within a part.
          micro_batches: In how many slices of a batch, or of each device's part, the dense model sees the examples, one
            after another, so that its activations take the memory of one. Rows and dense parameters take one step, of
            the whole batch; a loss that compares across examples does so within a slice.

        Returns:
          A function of a batch of ``feed`` to the loss, () float32, and the step's outputs: of all devices' examples,
          ``logits`` before the step, ``labels``, ``mask``. They are computed while the program goes on.
        """
        step_on = self._state.compiled.with_loss(loss, micro_batches)
        return lambda batch: self._take(batch, step_on)

    def _take(self, batch: FedBatch, step_on: StepOn) -> tuple[jax.Array, Seen]:
        if batch.feed not in self._feeds:
            raise ValueError("a step takes a batch of this run's feed; this one is of another run")
        batch.feed.check(batch)
        if self._checkpoints is not None:
            self._checkpoints.between_steps()
        host, outputs = self._state.step(batch.ready, step_on)
        batch.feed.stepped(batch, host, outputs)
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
            Arrays may be written over when the next item is asked for: docs/library.md, "Arrays that you hand over".
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
          RuntimeError: If another feed is open that reads rows in host memory ahead of its steps, as this one would.
        """
        growing, packing = self._state.growing, {**packing, "orders": kept_orders(packing.get("orders"))}
        self._feeds = [feed for feed in self._feeds if not feed.closed]
        if growing:
            if self._feeds or hot:
                raise RuntimeError(
                    "tables of the run grow with the order of its batches, so that it has one feed at a time, and no"
                    " hot batches; take all batches of the other feed, or close it first"
                )
            packing["vocabularies"] = {**packing.get("vocabularies", {}), **growing.keys()}
        reads_ahead = bool(self._state.tables) and not (self._in_place or hot)
        if reads_ahead and any(feed.reads_ahead for feed in self._feeds):
            raise RuntimeError(
                "another feed of the run reads rows in host memory ahead of its steps, which steps of this one would"
                " change; take all of its batches, or close it first"
            )
        setup = self._state.setup
        if hot and setup is None:
            raise ConfigError("hot batches read the rows that every device has by a plan; give distribute a plan")
        setup = setup.for_hot_batches() if hot and setup is not None else setup
        transform: Callable[[Batch], Any] | None = None
        if setup is not None:
            transform = functools.partial(hot_parts, setup) if hot else setup.parts
        if self._in_place:
            transform = HostCasts(self.layout.host_stacks)
        cast = "host" if setup is None else "none"
        packer = Packer(self.layout, dense=dense, label=label, on_bad_id=on_bad_id, cast=cast, **packing)
        shared = 1 if setup is None else sum(number in setup.local for number in setup.plan.askers)
        ahead = setup is not None or bool(self._state.tables)
        pack = ItemPacker(
            packer,
            batch_size,
            shared,
            growing,
            columns_wait=workers > 0 or setup is not None,
            batches_wait=ahead and not isinstance(batches, Loader),
        )
        packed = PackedBatches(batches, pack, transform=transform, workers=workers, prefetch=prefetch, order=pack.order)
        if hot and setup is not None:
            feed: Feed = MeshFeed(packed, setup=setup, total=None)
        else:
            feed = open_feed(self._state, packed, host=self._host, in_place=self._in_place)
        if position is not None:
            feed.restore(position)
        opened = RunFeed(feed, reads_ahead=reads_ahead)
        self._feeds.append(opened)
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
        if growing := self._state.growing:
            packing["vocabularies"] = {**packing.get("vocabularies", {}), **growing.now()}
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
    def growing(self) -> Mapping[str, GrowingVocabulary]:
        """The vocabularies of the tables that grow, copies as of the last step, by table."""
        return self._state.growing.now()

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
        check_output(target / "step")  # of which the folder is a parent: a dataset or an export takes no checkpoints
        if self._checkpoints is None or self._checkpoints.folder != target:
            self._finish()
            self._checkpoints = self._open(target, keep)
        about = {"meta": json.loads(json.dumps(dict(meta or {}))), "forms": self._forms()}
        state = self._state
        arrays = dense_arrays(state.state, state.growing.state(), self.layout)
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
        if any(not feed.closed for feed in self._feeds):
            raise RuntimeError("close the run's feeds before a checkpoint is restored, and make new ones after it")
        self._finish()
        self._checkpoints = self._open(pathlib.Path(folder).absolute(), keep=2)
        saved = self._checkpoints.open(step)
        state, progress = restore_state(saved, self._state.state, self.layout)
        self._state.growing.restore(progress)
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
