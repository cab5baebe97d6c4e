"""A model in training, wherever its rows live: its steps, batches, predictions, rows and checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

import jax
import numpy as np
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from jrec.checkpoint import Checkpoints, Saved
from jrec.checkpoint.save import Written
from jrec.data.blocks import LABEL
from jrec.data.growing import GrowingVocabulary
from jrec.data.growing_tables import GrowingTables
from jrec.data.packing import CastPlace, OnBadId, Packer
from jrec.data.unknown import UnknownCounts
from jrec.host import HostTable
from jrec.json_values import JsonMapping, JsonObject
from jrec.metrics import LabelEvaluation
from jrec.nn import SparseOptimizer, binary_cross_entropy
from jrec.nn.optimizer import Loss, SparseModel
from jrec.ops.layout import layout_shown
from jrec.outputs import check_local, kind_of
from jrec.regression import Numbers
from jrec.run.evaluation import evaluated
from jrec.run.feeds.batches import Position
from jrec.run.feeds.in_place import reads_in_place
from jrec.run.feeds.makers import Feeds
from jrec.run.feeds.options import FeedOptions, PackingOptions, Steps, check_iterable, check_least, check_packing
from jrec.run.feeds.run_feed import FedBatch, RunFeed
from jrec.run.identity import Description, identity_of
from jrec.run.options import HostOptions
from jrec.run.predictions import Predictions
from jrec.run.record import RECORD, Record, decoded
from jrec.run.run_checkpoints import CHECKPOINT_FOLDER, Loaded, RunCheckpoints
from jrec.run.state import RunState, table_rows
from jrec.run.step import Metrics, State, StepOn, StepResults
from jrec.shown import Shown, counted, human_bytes

if TYPE_CHECKING:
    from jrec.data.schema import Schema
    from jrec.serving.format import Dtype, Manifest

_EXPORT = {"command": "Run.export"}
Step = Callable[[FedBatch], tuple[jax.Array, StepResults]]


class Run:
    """A model in training, wherever its rows live; ``distribute`` makes it. Use it from one thread.

    Attributes:
      layout: The tables.
      mesh: The devices; None for one without a plan.
      plan: Where the rows of planned tables live; None without a mesh and a plan.
      predictions: Predicts batches as the run is at the moment; call ``flush`` first.
      steps: The number of steps taken.
      unknown: By feature, how many values that ``predict`` was given have no row of their own.
    """

    def __init__(
        self,
        state: RunState,
        model: SparseModel,
        optimizer: SparseOptimizer,
        *,
        host: HostOptions,
        cast: CastPlace,
        description: Description,
        record: Record | None = None,
    ):
        self._state = state
        self.layout = state.layout
        self.mesh, self.plan = (None, None) if state.setup is None else (state.setup.mesh, state.setup.plan)
        planned, implementation = self.plan is not None, model.embeddings.implementation
        in_place = state.training and reads_in_place(
            self.layout,
            host,
            planned=planned,
            exact=optimizer.has_tail,
            implementation=implementation,
            key="HostOptions.pipeline",
        )
        self._feeds = Feeds(state, host=host, in_place=in_place, cast=cast)
        self._record = record
        self._checkpoints = RunCheckpoints(state, identity_of(self.layout, optimizer, description))
        self.predictions, self.unknown = Predictions(state), UnknownCounts()
        step = optimizer.dense.step.get_value()
        self.steps = 0 if isinstance(step, jax.ShapeDtypeStruct) else int(step)

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> Shown:
        devices = 1 if self.mesh is None else self.mesh.devices.size
        plan = ", rows by a plan" if self.plan is not None else ""
        host = {name: table.nbytes for name, table in self.host_tables.items()}
        memory = f", {human_bytes(sum(host.values()))} in host memory so far" if host else ""
        head, layout = (
            f"Run: step {self.steps:,}, {counted(devices, 'device')}{plan}{memory}",
            layout_shown(self.layout),
        )
        return Shown((head, *layout.heads), layout.rows)

    def compile(
        self, *, loss: Loss = binary_cross_entropy, micro_batches: int = 1, metrics: Metrics | None = None
    ) -> Step:
        """A jitted step, in place on the run's arrays: lookup, gradients, update of dense parameters and rows.

        Args:
          loss: A function of what the model's ``logits`` returns and the batch, a mean over the batch's examples by
            ``batch.mask``, their weights (0 where there is none). On a mesh it sees a device's part of the batch, and
            the parts' losses count by these; what it compares across examples, it compares within a part, or with all
            examples of the batch by ``jrec.nn.all_examples``, as ``jrec.nn.in_batch_softmax`` does.
          micro_batches: In how many slices of a batch, or of each device's part, the dense model sees the examples, one
            after another, so that its activations take the memory of one. Rows and dense parameters take one step, of
            the whole batch; a loss that compares across examples does so within a slice.
          metrics: What steps count on the devices, to begin with: a pytree that an ``updated`` of its own adds logits,
            labels and mask of a step to; on a mesh its leaves have an axis of devices in front. It comes with the
            outputs instead of logits, labels and mask, which then do not leave the devices.

        Returns:
          A function of a batch of ``feed`` to the loss, () float32, and the step's outputs: of all devices' examples,
          ``logits`` before the step, ``labels``, ``mask``. They are computed while the program goes on. Of several
          steps in one dispatch, all have an axis of steps in front.
        """
        check_least(1, micro_batches=micro_batches)
        setup, counted = self._state.setup, metrics
        if setup is not None and metrics is not None:
            counted = setup.over_devices(metrics)
        step_on = self._state.compiled.with_loss(loss, micro_batches)

        def step(batch: FedBatch) -> tuple[jax.Array, StepResults]:
            nonlocal counted
            outputs = self._take(batch, step_on, counted)
            counted = outputs.metrics
            return outputs.loss, outputs

        return step

    def _take(self, batch: FedBatch, step_on: StepOn, metrics: Metrics | None) -> StepResults:
        if not isinstance(batch, FedBatch) or batch.feed not in self._feeds.opened:
            kind = f"one is a {type(batch).__name__}" if not isinstance(batch, FedBatch) else "one is of another run"
            raise ValueError(f"a step takes a batch of this run's feed, `for batch in run.feed(...)`; this {kind}")
        # Before anything is donated: a batch is refused while the state is whole.
        batch.feed.check(batch)
        self._checkpoints.between_steps()
        if (setup := self._state.setup) is not None and setup.monitor is not None:
            for one in batch.batches:
                setup.monitor.observe(one)
        # The old arrays are donated here: what fails within may leave no state to go on from.
        host, outputs = self._state.step(batch.ready, step_on, metrics)
        batch.feed.stepped(batch, host, outputs)
        self.steps += len(batch.batches)
        return outputs

    def feed(
        self,
        batches: Iterable[object],
        *,
        dense: Sequence[str] = (),
        label: str | None = LABEL,
        batch_size: int | None = None,
        hot: bool = False,
        on_bad_id: OnBadId = "raise",
        workers: int = 2,
        prefetch: int = 2,
        position: Position | None = None,
        total: int | None = None,
        steps: Steps = 1,
        trace: pathlib.Path | None = None,
        **packing: Unpack[PackingOptions],
    ) -> RunFeed:
        """Batches for steps, from any iterable of examples; packed, routed and prefetched in threads.

        Args:
          batches: Yields columns as ``jrec.data.pack_batch`` takes them, or packed batches. A ``jrec.data.Loader`` goes
            on where it stands, and does all work in its own threads. With several processes each gives its own part of
            every batch, all parts of one size, equally many of them.
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
          total: How many batches will be taken at most, so that none is read ahead that no step takes; None for all.
          steps: How many batches, one step each, go to the device in one dispatch, or a function of how many were
            read before it to that number: each item of the feed then holds that number of batches, the last items one
            each. The results have the same bits as with one batch each. For a GPU, whose step may take less time than
            Python's part of it; 16 to begin with. Not for batches that read rows in host memory, nor with tables that
            grow.
          trace: A file for the trace of the stages of rows in host memory, for Chrome or Perfetto; None for none.
          **packing: Further arguments of ``pack_batch``.

        Raises:
          ConfigError: If ``hot``, but there is no plan; if ``steps``, but batches read host memory, or tables grow;
            or a number is too small.
          RuntimeError: If another feed is open that reads rows in host memory ahead of its steps, as this one would.
          TypeError: If ``batches`` are the columns of one batch; put them in a list.
        """
        options = FeedOptions(
            dense=dense, label=label, batch_size=batch_size, hot=hot, on_bad_id=on_bad_id, workers=workers,
            prefetch=prefetch, position=position, total=total, steps=steps, trace=trace, packing=packing,
        )  # fmt: skip
        check_iterable("feed", batches)
        return self._feeds.open(batches, options)

    @property
    def one_by_one(self) -> str:
        """Why ``feed`` takes no ``steps``: every step needs the host before it; "" where it does."""
        return self._feeds.one_by_one()

    def predict(
        self,
        columns: object,
        *,
        dense: Sequence[str] = (),
        batch_size: int | None = None,
        on_bad_id: OnBadId = "raise",
        max_unknown: float | None = None,
        **packing: Unpack[PackingOptions],
    ) -> PyTree[np.ndarray]:
        """What the model's ``logits`` returns for some examples, NumPy arrays; every process gives the same examples.

        The model predicts in eval mode, without dropout and with the running averages of BatchNorm, whatever mode it
        trains in, and none of its state changes.

        Values that have no row of their own, in tables with vocabularies and in those that grow, are counted in
        ``unknown``. Where they are many more than in training, an ``UnknownValuesWarning`` names some of them.

        Args:
          columns: Columns in any form that ``pack_batch`` takes, without labels.
          dense: Names of the float features, in the order the model takes them.
          batch_size: How many examples are predicted at once, to compile one program for any number; None for all.
          on_bad_id: See ``pack_batch``.
          max_unknown: The largest share of a feature's values, 0 to 1, that may have no row; None for any.
          **packing: Further arguments of ``pack_batch``.

        Raises:
          DatasetError: If more values are unknown than may be; names feature, share and some of the values. And
            whatever ``pack_batch`` raises.
        """
        check_packing("predict", packing)
        check_least(1, batch_size=batch_size)
        unknown = UnknownCounts()
        packer = self._packer(unknown, packing, dense=dense, label=None, on_bad_id=on_bad_id)
        prepared = packer.prepare(columns)
        self.unknown.take(unknown, max_unknown)
        size = batch_size or max(1, prepared.examples)
        parts = []
        for begin in range(0, max(1, prepared.examples), size):
            chosen = prepared.cut(begin, min(begin + size, prepared.examples))
            logits = self.predictions.of_batch(packer.pack(chosen, size))
            parts.append(jax.tree.map(lambda array, count=chosen.examples: np.asarray(array)[:count], logits))
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    def evaluate(
        self,
        batches: Iterable[object],
        *,
        dense: Sequence[str] = (),
        label: str = LABEL,
        batch_size: int | None = None,
        on_bad_id: OnBadId = "raise",
        max_unknown: float | None = None,
        numbers: Numbers | Mapping[str, Numbers] | None = None,
        **packing: Unpack[PackingOptions],
    ) -> LabelEvaluation | dict[str, LabelEvaluation]:
        """AUC, log loss, normalized entropy, calibration and more of predictions, beside the labels; see ``predict``.

        ``run.evaluate([columns], dense=["price"]).auc`` is of some columns.

        Args:
          batches: Yields columns as ``predict`` takes them, with labels; or packed batches, as of a
            ``jrec.data.Loader``. Every process gives the same ones.
          dense: Names of the float features, in the order the model takes them.
          label: Name of the labels, 0 or 1. Where ``logits`` returns a dictionary by label, as ``jrec.nn.MultiTask``
            does, of the first; ``extras`` then names the columns of the others, of which -1 is not known, and NaN of
            labels that are numbers.
          batch_size: How many examples are predicted at once; None for as many as the first item has.
          on_bad_id: See ``pack_batch``.
          max_unknown: See ``predict``.
          numbers: Where labels are numbers, how outputs are (``jrec.regression.Numbers()`` for the outputs themselves);
            of several labels a mapping, by the names of those that are numbers.
          **packing: Further arguments of ``pack_batch``, such as ``weight``.

        Returns:
          The metrics (``jrec.metrics.UNITS``), computed in float64 on the host; of several labels by name. Of numbers
          RMSE, MAE, R2 and Poisson's deviance (``jrec.regression.UNITS``).

        Raises:
          DatasetError: If there are no examples, a label is missing, or more values are unknown than may be.
          DivergedError: If a logit is NaN or infinite.
          ValueError: If a label is neither 0 nor 1 without ``numbers``, or the model returns no logit for each example.
        """
        check_packing("evaluate", packing)
        check_least(1, batch_size=batch_size)
        check_iterable("evaluate", batches)
        unknown = UnknownCounts()
        packer = self._packer(unknown, packing, dense=dense, label=label, on_bad_id=on_bad_id)
        metrics = evaluated(self.predictions, batches, packer, batch_size, numbers)
        self.unknown.take(unknown, max_unknown)
        return metrics

    def _packer(
        self,
        unknown: UnknownCounts,
        packing: PackingOptions,
        *,
        dense: Sequence[str],
        label: str | None,
        on_bad_id: OnBadId,
    ) -> Packer:
        """Packs examples for predictions with the rows as they are now; flushes."""
        self.flush()
        if growing := self._state.growing:
            packing["vocabularies"] = {**(packing.get("vocabularies") or {}), **growing.now()}
        return Packer(self.layout, dense=dense, label=label, on_bad_id=on_bad_id, unknown=unknown, **packing)

    def calibrate(self, scale: float, shift: float) -> tuple[float, float]:
        """From now on predicts ``scale * logit + shift``, where ``logit`` is the model's own.

        Training goes on as before; checkpoints and exports keep both numbers. They should be the best on examples that
        the model was not trained on. Every process calls it with the same two.

        Args:
          scale: Above 0.
          shift: Any finite number.

        Returns:
          The two numbers until now.

        Raises:
          ValueError: If the numbers are none of these, or the model has no ``jrec.nn.Calibration`` called
            ``calibration``; jrec's own have one with ``calibrated=True``.
        """
        if not (np.isfinite([scale, shift]).all() and scale > 0):
            raise ValueError(f"scale is {scale} and shift {shift}; give a scale above 0, and a finite shift")
        return self._state.calibrate(scale, shift)

    def flush(self) -> None:
        """Waits until every row is where it lives, as the last step left it."""
        for feed in self._feeds.opened:
            feed.flush()

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
        self.flush()
        return self._state.read(name, _row_numbers(ids))

    def set_rows(self, name: str, ids: Sequence[int] | np.ndarray, rows: ArrayLike) -> None:
        """Gives rows of a table values, wherever they live, such as pretrained vectors; docs/pretrained_rows.md.

        The rows have no past from then on: their slots are as of rows that no step has touched. Every process calls
        it with the same arguments.

        Args:
          name: The table.
          ids: (n,) integers, each once.
          rows: (n, dim) floats, which are rounded to the table's dtype.

        Raises:
          RuntimeError: If a feed of the run is open, which may have read ahead of the rows; or the run only predicts.
          ValueError: If there is no such table or row, a row is there twice or in tensor-train cores, or a vector is
            not finite, or of another length; nothing is written.

        Example:
          >>> run = jrec.distribute(model, optimizer)
          >>> run.set_rows("item", [3, 17], np.zeros((2, 8)))
        """
        self._check_no_feeds("rows are set")
        if not self._state.training:
            raise RuntimeError("the run only predicts (training=False); set rows in a run that trains")
        self._state.write(name, _row_numbers(ids), np.asarray(rows))

    @property
    def growing(self) -> Mapping[str, GrowingVocabulary]:
        """The vocabularies of the tables that grow, copies as of the last step, by table."""
        return self._state.growing.now()

    @property
    def host_tables(self) -> Mapping[str, HostTable]:
        """The rows in host memory, by stack, such as how many of them take memory: ``num_made``, ``nbytes``."""
        return dict(self._state.tables)

    def modules(self) -> tuple[SparseModel, SparseOptimizer]:
        """Model and optimizer as the last step left them; planned rows are not in them.

        The next step takes their arrays, so that they are to be read before it.
        """
        self.flush()
        return self._state.modules()

    @property
    def state(self) -> State:
        """Dense parameters, their optimizer, and all other state that every device holds alike: an ``nnx.State``."""
        return self._state.state

    @property
    def growing_tables(self) -> GrowingTables:
        """How keys of growing tables become rows, as of the last step; false where no table grows."""
        return self._state.growing

    def plan_sections(self, folder: pathlib.Path) -> JsonObject:
        """What a report says of a plan by `jrec plan`; writes the profile of the run's accesses to ``folder``."""
        return {} if self._state.setup is None else self._state.setup.sections(folder)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        meta: JsonMapping | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        keep: int = 2,
        protected: int | None = None,
        wait: bool = True,
    ) -> None:
        """Writes a checkpoint of this step to FOLDER/STEP: rows, slots, all state of the model; docs/checkpoints.md.

        Further checkpoints in the folder hold only what changed. A run on any mesh and plan can restore it. Commands
        read it where it says what made the model and its dataset: docs/library.md.

        Args:
          folder: A folder for the run's checkpoints, which every process sees.
          meta: Further information in JSON types, such as the feed's position; ``restore`` returns it.
          arrays: Further arrays by name; ``load`` returns them.
          keep: How many checkpoints stay there.
          protected: A step whose checkpoint stays there, though it is not among the latest.
          wait: Whether to return only when it is complete. Otherwise it is written while steps go on; several
            processes wait in any case.

        Raises:
          CheckpointError: If it cannot be written.
          OutputError: If ``folder`` is a URI, or lies inside of another work of jrec.
        """
        check_local(folder)
        self.flush()
        # Through JSON at once, so that what cannot be written fails here, and later changes of the caller's do not get
        # in.
        about = {"meta": json.loads(json.dumps(dict(meta or {}))), "forms": self._sending()}
        about |= {} if self._record is None else self._record.of(*self._feeds.fed).meta()
        self._checkpoints.save(
            self.steps,
            pathlib.Path(folder).absolute(),
            about,
            arrays=arrays or {},
            keep=keep,
            protected=protected,
            wait=wait,
        )

    def written(self) -> Written | None:
        """What the last checkpoint was, once it is complete; None where there is none since the last call."""
        return self._checkpoints.written()

    def finish_saving(self) -> None:
        """Returns when the checkpoint under way, if there is one, is complete.

        Raises:
          CheckpointError: If it could not be written.
        """
        self._checkpoints.finish()

    def restore(self, folder: str | os.PathLike[str], *, step: int | None = None) -> JsonObject:
        """Reads a checkpoint of ``save`` or `jrec train`, on any mesh and plan; the steps after it have the same bits.

        The dense optimizer must be the same optax transformation; learning rates of `jrec train` are schedules.

        Args:
          folder: A folder of ``save``, or the folder of a run of `jrec train`.
          step: Which; None for the latest.

        Returns:
          What ``save`` was given as ``meta``.

        Raises:
          CheckpointError: If there is none, or it is damaged, or of another model.
          RuntimeError: If a feed of the run is open: it has read ahead of rows that change now.
        """
        self._check_no_feeds("a checkpoint is restored")
        place = pathlib.Path(folder).absolute()
        place = place / CHECKPOINT_FOLDER if kind_of(place) == "run" else place
        return self.load(Checkpoints(place).open(step)).meta

    def load(
        self,
        saved: Saved,
        *,
        goes_on: bool = True,
        slots: bool = True,
        rows: bool = True,
        dense_optimizer: bool = True,
        expected: Description | None = None,
    ) -> Loaded:
        """Takes over a checkpoint; see ``restore``.

        Args:
          saved: The checkpoint.
          goes_on: Whether the run goes on from its step; otherwise it begins from its model, rows and slots.
          dense_optimizer: Whether to take over the state of the dense optimizer, which must then be of its kind, and
            all streams of random numbers. Otherwise it stays as the run has it, and so do streams of only one of them.
          expected: Entries of the run's description, by key, that the checkpoint is to have in place of the run's own.
          slots: Whether to read the optimizers' state on one device; without it the run can only predict.
          rows: Whether to read rows; without them, and slots, only the dense model is of use.
        """
        self._check_no_feeds("a checkpoint is restored")
        loaded = self._checkpoints.load(
            saved, goes_on=goes_on, slots=slots, rows=rows, dense_optimizer=dense_optimizer, expected=expected or {}
        )
        if goes_on:
            self.steps, setup = saved.step, self._state.setup
            if setup is not None and (send := saved.manifest.meta.get("forms")) is not None:
                setup.modes.restore(send)
        if self._record is not None and (before := saved.manifest.meta.get(RECORD)) is not None:
            before = decoded(before, where=str(saved.folder))
            self._record = self._record.of(before.dense, before.dataset)
        return loaded

    def export(
        self,
        folder: str | os.PathLike[str],
        *,
        dense: Sequence[str] | Mapping[str, int] = (),
        schema: Schema | None = None,
        dtype: Dtype | None = None,
        since: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        onnx: bool = False,
        overwrite: bool = False,
    ) -> Manifest:
        """Writes the model as the last step left it, for ``jrec.serving.load``: docs/serving.md.

        Args:
          folder: The folder to make; it appears when it is whole.
          dense: Names of the float features, in the order the model takes them; a mapping says of each how many numbers
            an example has.
          schema: The prepared dataset's, read from its folder (``jrec.data.Schema.load``), so that requests have raw
            values; None for requests with row numbers, as ``predict`` takes them.
          dtype: "float32", "bfloat16", "float16", "int8" or "int4", as which rows are kept; None for the tables' own.
          since: An export, or a list of it and the deltas that follow it: writes only what changed, as the next delta.
          onnx: Whether to write the dense part for onnxruntime, too.
          overwrite: Replaces an export there.

        Returns:
          What was written.

        Raises:
          ExportError: If the model cannot be served, or ``since`` is of another one.
          OutputError: If the folder may not or cannot be written.
        """
        from jrec.run.export import of_run, write_export

        self.flush()
        source = of_run(self._state, step=self.steps, dense=dense, schema=schema)
        inputs = [] if schema is None or schema.folder is None else [schema.folder]
        return write_export(
            source, folder, dtype=dtype, since=since, onnx=onnx, overwrite=overwrite, about=_EXPORT, inputs=inputs
        )

    def close(self, *, finish: bool = True) -> None:
        """Ends all threads.

        Args:
          finish: Whether what the last step left is stored, and a checkpoint under way completed; otherwise the run is
            lost, and the checkpoint vanishes.
        """
        with contextlib.ExitStack() as stack:
            # Callbacks run from the last to the first, and all of them even where one raises: a checkpoint under way
            # ends first, then the feeds, and last the exchange with other processes, which both may use.
            stack.callback(self._state.setup.close if self._state.setup is not None else lambda: None)
            for feed in self._feeds.opened:
                stack.callback(feed.close, flush=finish)
            stack.callback(self._checkpoints.finish if finish else self._checkpoints.close)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_no_feeds(self, before: str) -> None:
        if any(not feed.closed for feed in self._feeds.opened):
            raise RuntimeError(f"close the run's feeds before {before}, and make new ones after it")

    def _sending(self) -> list[str] | None:
        """The features whose lookups are sent, where the same batches will not decide it again."""
        setup, opened = self._state.setup, self._feeds.opened
        decides_again = bool(opened) and all(feed.replays for feed in opened)
        return None if setup is None or decides_again or not setup.modes.decided else sorted(setup.modes.send)


def _row_numbers(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    numbers = np.asarray(ids)
    return numbers if numbers.size else numbers.astype(np.int64)  # an empty list is of floats
