"""Scores of a whole split, or of its first batches, during a run or from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jrec import memory
from jrec.app import determinism
from jrec.app.build import run_parameters
from jrec.app.config import LRScheduleConfig, TrainConfig
from jrec.app.config.typed_toml import MOST
from jrec.app.dataset import check_tasks, evaluation_config, plan_of
from jrec.app.importance import ImportanceOptions, feature_importance, permuted_features
from jrec.app.loaders import eval_loader
from jrec.app.make_run import make_run
from jrec.app.models.catalogue import Catalogue
from jrec.app.models.reading import Reading
from jrec.app.processes.mesh_processes import shared_scores, sum_of_all
from jrec.app.progress import TrainingProgress
from jrec.app.report.ranking import AnyScores
from jrec.app.run_record import RunRecord, find_run
from jrec.app.tables import on_devices
from jrec.checkpoint import Checkpoints, Saved
from jrec.data.columns import Column
from jrec.data.fae import is_fae_folder
from jrec.data.identity import Identity
from jrec.data.schema import DatasetError, Schema
from jrec.data.unknown import UnknownValues
from jrec.errors import CheckpointError, ConfigError
from jrec.json_values import JsonObject
from jrec.nn.optimizer import SparseModel
from jrec.ops.layout import EmbeddingLayout
from jrec.run.processes import first
from jrec.run.run import Run
from jrec.sharding import Plan


class UnknownOfSplit:
    """Counts, while a split is scored, the values that training did not see; of tables that grow nothing is said.

    Args:
      schema: What the model reads of the dataset.

    Attributes:
      counts: The counts by feature.
    """

    def __init__(self, schema: Schema):
        self.counts = UnknownValues(schema)
        self._features, self._lock, self._blocks = schema.categorical, threading.Lock(), set[int]()

    def watch(self, block: int, columns: Mapping[str, Column]) -> None:
        """Counts the values of a block, the first time that it is read; threads of a loader call it."""
        with self._lock:
            if block not in self._blocks:
                self._blocks.add(block)
                for feature in self._features:
                    self.counts.add_rows(feature, columns[feature.name])

    def share(self) -> None:
        """Has the counts of all processes, each of which read other examples; every process calls it."""
        features = list(self.counts.features.values())
        counted = np.array([count for feature in features for count in (feature.values, feature.unknown)], np.int64)
        for feature, (values, unknown) in zip(features, sum_of_all(counted).reshape(-1, 2), strict=True):
            feature.values, feature.unknown = int(values), int(unknown)


def score_split(
    reading: Reading,
    split: str,
    *,
    start: int = 0,
    stop: int | None = None,
    limit: int = 0,
    shuffle: bool = False,
    progress: TrainingProgress,
    unknown: UnknownOfSplit | None = None,
) -> AnyScores:
    """Predicts every example of a split; each process of a mesh reads and cuts its own share of them.

    Args:
      reading: The run.
      split: "train", "valid" or "test".
      start, stop: The first of its examples to score, and one past the last; None for its last one.
      limit: Batches to read at most; 0 for all.
      shuffle: Whether they are of all of the split (``eval_loader``); else they are its first ones.
      progress: Shows the batches.
      unknown: Counts the values that training did not see; None for nothing.

    Returns:
      The scores of all processes' examples, in the loader's order, in every process.

    Raises:
      DatasetError: If the split cannot be used.
      DivergedError: If a logit is NaN or infinite.
    """
    run, config, schema = reading.run, reading.config, reading.schema
    kind = config.model.of_kind
    if kind.needs_labels:
        schema.check_labels()
    run.flush()
    loading, watch = run.predictions.loading, None if unknown is None else unknown.watch
    order = {"start": start, "stop": stop, "limit": limit, "shuffle": shuffle}
    with (
        eval_loader(config, schema, run.layout, split, **order, watch=watch, **loading) as loader,
        progress.evaluating(split, loader.batches_per_epoch) as advance,
    ):
        shared, predictions = loading.get("shared", False), run.predictions.of_split(loader)
        scores = kind.scores(predictions, reading, check=not shared, on_batch=advance)
        if unknown is not None and shared:
            unknown.share()
        return shared_scores(scores) if shared else scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointScores:
    """A checkpoint's scores on a split of a dataset, and which of the values that it read training did not see.

    ``importance`` is how important its features are, where that was asked for.
    """

    step: int
    scores: AnyScores
    schema: Schema
    trained_on: Identity
    config: TrainConfig
    parameters: dict[str, dict[str, int]]
    unknown: UnknownValues
    importance: JsonObject | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run and one of its checkpoints, of which no row is read yet.

    Attributes:
      record: The run.
      config: The run's configuration without its ``lr_schedule``, since no step is taken.
      schema: The dataset.
      trained_on: The dataset that the run was trained on, whose rows have the same meaning.
      layout: The tables.
      saved: The checkpoint.
      plan: The plan to predict by, if any.
    """

    record: RunRecord
    config: TrainConfig
    schema: Schema
    trained_on: Identity
    layout: EmbeddingLayout
    saved: Saved
    plan: Plan | None = None

    @property
    def folder(self) -> pathlib.Path:
        """The run's folder."""
        return self.record.folder

    def advising(self) -> contextlib.AbstractContextManager[None]:
        """Around reads of the checkpoint: errors about damaged files name the newest earlier whole checkpoint."""
        return _advising(self.record, self.saved.step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredRun(OpenedRun):
    """A run as one of its checkpoints has it, for predictions.

    Attributes:
      run: The run.
      arrays: The running metrics.
    """

    run: Run
    arrays: dict[str, np.ndarray]

    @property
    def state(self) -> Any:
        """The state of model and optimizer."""
        return self.run.state

    @functools.cached_property
    def reading(self) -> Reading:
        """What its evaluations read."""
        catalogue = self.config.model.of_kind.catalogue(self.folder, self.config, self.schema, self.trained_on)
        return Reading(run=self.run, config=self.config, schema=self.schema, catalogue=catalogue)

    @property
    def catalogue(self) -> Catalogue | None:
        """The items that the model ranks, where a tower makes their vectors; else None."""
        return self.reading.catalogue

    @property
    def model(self) -> SparseModel:
        """The model with the checkpoint's state."""
        return self.run.modules()[0]

    def scores(self, split: str, *, limit: int = 0, unknown: UnknownOfSplit | None = None) -> AnyScores:
        """Scores a split with this model.

        Args:
          split: "train", "valid" or "test".
          limit: Batches to read at most; 0 for all.
          unknown: Counts the values that training did not see; None for nothing.

        Raises:
          DatasetError: If the split cannot be used.
          DivergedError: If a logit is NaN or infinite.
        """
        with _own_progress() as progress:
            return score_split(self.reading, split, limit=limit, progress=progress, unknown=unknown)

    def importance(self, split: str, options: ImportanceOptions | None = None, *, limit: int = 0) -> JsonObject:
        """How important the model's features are on a split; see ``feature_importance``."""
        self.run.flush()
        with _own_progress() as progress:
            return feature_importance(self.reading, split, options=options, limit=limit, progress=progress)


def open_run(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    devices: int = 1,
    plan: str = "",
) -> OpenedRun:
    """Opens a checkpoint and reads its configuration, dataset and layout; arguments as in ``restore_run``."""
    record, step = find_run(pathlib.Path(checkpoint))
    config = record.config([] if data is None else [f"data.path={str(data)!r}"])
    if config.deterministic:
        determinism.request(required=False)
    if devices == 1 and (processes := jax.process_count()) > 1:
        raise ConfigError(
            f"--devices is 1, but {processes} processes were started; give the number of all their devices"
        )
    if data is None and not (trained_with := pathlib.Path(config.data.path)).exists():
        raise DatasetError(
            f"{record.folder} was trained on {trained_with}, which is not there, seen from {pathlib.Path.cwd()}; say"
            " where the dataset is now (--data, or data= in Python)"
        )
    config = evaluation_config(dataclasses.replace(config, lr_schedule=LRScheduleConfig()))
    schema = config.model.of_kind.schema(config.model, Schema.load(config.data.path))
    trained_on = record.check_evaluated(schema.identity)
    check_tasks(config, schema)
    config = on_devices(dataclasses.replace(config, schedule="plain"), schema, devices, plan_of(config))
    config = dataclasses.replace(config, plan=plan)
    placed = plan_of(config)
    config, layout = record.tables(config, schema, placed)
    step = record.chosen_step() if step is None else step
    with _advising(record, step or 0):
        saved = Checkpoints(record.checkpoints).open(step)
    return OpenedRun(
        record=record,
        config=config,
        schema=schema,
        trained_on=trained_on,
        layout=layout,
        saved=saved,
        plan=placed,
    )


def restore_run(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    devices: int = 1,
    plan: str = "",
    slots: bool = False,
) -> RestoredRun:
    """Reads a checkpoint.

    Args:
      checkpoint: A run folder, or one checkpoint in it.
      data: A dataset with the features and tables of the training data; None for the training data.
      devices: How many devices predict, whatever the number that trained.
      plan: The file of a plan for these devices, for training or for inference; "" for none.
      slots: Whether to read the optimizer's slots of rows on the device, too; empty arrays stand for them otherwise.

    Raises:
      CheckpointError: If there is no such checkpoint, or its model is for a dataset whose rows mean other values.
      ConfigError: If several processes would share one device.
      DatasetError: If the dataset cannot be used.
    """
    return load_opened(open_run(checkpoint, data, devices=devices, plan=plan), slots=slots)


def load_opened(opened: OpenedRun, *, slots: bool = False, rows: bool = True) -> RestoredRun:
    """The run of an opened checkpoint, to predict with or, without ``rows``, to export its dense model."""
    made = opened.record.made
    run = make_run(
        opened.config,
        opened.schema,
        opened.layout,
        total_steps=MOST,
        plan=opened.plan,
        trained_on=opened.trained_on,
        key=None if made is None else made.table_key(),
        training=False,
        abstract=True,
    )
    with opened.advising():
        loaded = run.load(opened.saved, slots=slots, rows=rows)
    memory.started()
    return RestoredRun(**vars(opened), run=run, arrays=loaded.arrays)


def _advising(record: RunRecord, step: int) -> contextlib.AbstractContextManager[None]:
    def remedy(whole: int | None) -> str:
        if whole is None:
            return "no earlier checkpoint of the run is whole"
        return f"the newest earlier one that is whole is {record.checkpoints / str(whole)}"

    return Checkpoints(record.checkpoints).reading(step, remedy)


def _own_progress() -> TrainingProgress:
    return TrainingProgress("auto" if first() else "off", total=0, start=0)


def _needs_labels(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether a run is scored by labels; also where there is no run, as is said later."""
    try:
        return find_run(pathlib.Path(checkpoint))[0].config().model.of_kind.needs_labels
    except (CheckpointError, ConfigError):
        return True


def evaluate_checkpoint(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    *,
    split: str,
    limit: int = 0,
    devices: int = 1,
    plan: str = "",
    importance: ImportanceOptions | None = None,
) -> CheckpointScores:
    """Scores a split with a checkpoint's model; see ``restore_run`` and ``RestoredRun.scores``, ``.importance``."""
    if data is not None and not is_fae_folder(data) and _needs_labels(checkpoint):
        Schema.load(data).check_labels()
    opened = open_run(checkpoint, data, devices=devices, plan=plan)
    if importance is not None:
        permuted_features(opened.config, opened.schema, importance.groups)  # wrong names before rows are read
    run = load_opened(opened)
    unknown = UnknownOfSplit(run.schema)
    return CheckpointScores(
        step=run.saved.step,
        scores=run.scores(split, limit=limit, unknown=unknown),
        unknown=unknown.counts,
        importance=None if importance is None else run.importance(split, importance, limit=limit),
        schema=run.schema,
        trained_on=run.trained_on,
        config=run.config,
        parameters=run_parameters(run.run),
    )
