"""Scores of a whole split, or of its first batches, during a run or from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable
from typing import Any, cast

import jax
import numpy as np

from jrec import memory
from jrec.app import determinism
from jrec.app.build import build_layout, run_parameters
from jrec.app.config import LRScheduleConfig, TrainConfig
from jrec.app.config.typed_toml import MOST
from jrec.app.dataset import check_tasks, evaluation_config, plan_of
from jrec.app.loaders import eval_loader
from jrec.app.make_run import make_run
from jrec.app.models.catalogue import Catalogue
from jrec.app.processes.mesh_processes import shared_scores
from jrec.app.progress import TrainingProgress
from jrec.app.report.ranking import AnyScores
from jrec.app.run_dataset import check_evaluated
from jrec.app.run_folder import (
    checkpoints_of,
    find_checkpoint,
    holds_checkpoints,
    latest_record,
    load_run_config,
    settled,
)
from jrec.app.tables import on_devices
from jrec.app.watch import chosen_step
from jrec.batch import Batch
from jrec.checkpoint import Checkpoints, Saved
from jrec.data.fae import is_fae_folder
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.errors import CheckpointError, ConfigError
from jrec.nn.optimizer import SparseModel
from jrec.ops.layout import EmbeddingLayout
from jrec.run.processes import first
from jrec.run.record import Record
from jrec.run.run import Run
from jrec.sharding import Plan


def score_split(
    config: TrainConfig,
    schema: Schema,
    run: Run,
    split: str,
    *,
    limit: int = 0,
    shuffle: bool = False,
    progress: TrainingProgress,
    catalogue: Catalogue | None = None,
) -> AnyScores:
    """Predicts every example of a split; each process of a mesh reads and cuts its own share of them.

    Args:
      config: The run's configuration.
      schema: The dataset.
      run: The run, as its last step left it.
      split: "train", "valid" or "test".
      limit: Batches to read at most; 0 for all.
      shuffle: Whether they are of all of the split (``eval_loader``); else they are its first ones.
      progress: Shows the batches.
      catalogue: The items to rank, where a tower makes their vectors.

    Returns:
      The scores of all processes' examples, in the loader's order, in every process.

    Raises:
      DatasetError: If the split cannot be used.
      DivergedError: If a logit is NaN or infinite.
    """
    kind = config.model.of_kind
    if kind.needs_labels:
        schema.check_labels()
    run.flush()
    loading = run.predictions.loading
    with (
        eval_loader(config, schema, run.layout, split, limit=limit, shuffle=shuffle, **loading) as loader,
        progress.evaluating(split, loader.batches_per_epoch) as advance,
    ):
        shared, predictions = loading.get("shared", False), run.predictions.of_split(loader)
        predictions = cast("Iterable[tuple[Any, Batch]]", predictions)
        scores = kind.scores(predictions, run, config, schema, catalogue=catalogue, check=not shared, on_batch=advance)
        return shared_scores(scores) if shared else scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointScores:
    """A checkpoint's scores on a split of a dataset."""

    step: int
    scores: AnyScores
    schema: Schema
    trained_on: Identity
    config: TrainConfig
    parameters: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run and one of its checkpoints, of which no row is read yet.

    Attributes:
      folder: The run's folder.
      config: The run's configuration without its ``lr_schedule``, since no step is taken.
      schema: The dataset.
      trained_on: The dataset that the run was trained on, whose rows have the same meaning.
      layout: The tables.
      saved: The checkpoint.
      record: What made the model of a folder of ``Run.save``; None of a run's folder, whose configuration says so.
      plan: The plan to predict by, if any.
    """

    folder: pathlib.Path
    config: TrainConfig
    schema: Schema
    trained_on: Identity
    layout: EmbeddingLayout
    saved: Saved
    record: Record | None = None
    plan: Plan | None = None

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Around reads of the checkpoint: errors about damaged files name the newest earlier whole checkpoint."""
        return _checkpoints(self.folder).reading(self.saved.step, functools.partial(_remedy, self.folder))


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
    def catalogue(self) -> Catalogue | None:
        """The items that the model ranks, where a tower makes their vectors; else None."""
        return self.config.model.of_kind.catalogue(self.folder, self.config, self.schema, self.trained_on)

    @property
    def model(self) -> SparseModel:
        """The model with the checkpoint's state."""
        return self.run.modules()[0]

    def scores(self, split: str, *, limit: int = 0) -> AnyScores:
        """Scores a split with this model.

        Args:
          split: "train", "valid" or "test".
          limit: Batches to read at most; 0 for all.

        Raises:
          DatasetError: If the split cannot be used.
          DivergedError: If a logit is NaN or infinite.
        """
        with TrainingProgress("auto" if first() else "off", total=0, start=0) as progress:
            return score_split(
                self.config, self.schema, self.run, split, limit=limit, progress=progress, catalogue=self.catalogue
            )


def open_run(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    devices: int = 1,
    plan: str = "",
) -> OpenedRun:
    """Opens a checkpoint and reads its configuration, dataset and layout; arguments as in ``restore_run``."""
    folder, step = find_checkpoint(pathlib.Path(checkpoint))
    config = load_run_config(folder, [] if data is None else [f"data.path={str(data)!r}"])
    if config.deterministic:
        determinism.request(required=False)
    if devices == 1 and (processes := jax.process_count()) > 1:
        raise ConfigError(
            f"--devices is 1, but {processes} processes were started; give the number of all their devices"
        )
    config = evaluation_config(dataclasses.replace(config, lr_schedule=LRScheduleConfig()))
    schema = config.model.of_kind.schema(config.model, Schema.load(config.data.path))
    trained_on = check_evaluated(folder, schema.identity)
    check_tasks(config, schema)
    config = on_devices(dataclasses.replace(config, schedule="plain"), schema, devices, plan_of(config))
    config = dataclasses.replace(config, plan=plan)
    placed = plan_of(config)
    checkpoints, record = _checkpoints(folder), latest_record(folder) if holds_checkpoints(folder) else None
    if record is None:
        layout = build_layout(config, schema, placed)
    else:
        config, layout = settled(record, config, schema), record.layout(planned=config.planned)
    step = chosen_step(folder) if step is None else step
    with checkpoints.reading(step or 0, functools.partial(_remedy, folder)):
        saved = checkpoints.open(step)
    return OpenedRun(
        folder=folder,
        config=config,
        schema=schema,
        trained_on=trained_on,
        layout=layout,
        saved=saved,
        record=record,
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
    run = make_run(
        opened.config,
        opened.schema,
        opened.layout,
        total_steps=MOST,
        plan=opened.plan,
        trained_on=opened.trained_on,
        key=None if opened.record is None else opened.record.table_key(),
        training=False,
        abstract=True,
    )
    with opened.reading():
        loaded = run.load(opened.saved, slots=slots, rows=rows)
    memory.started()
    return RestoredRun(**vars(opened), run=run, arrays=loaded.arrays)


def _checkpoints(folder: pathlib.Path) -> Checkpoints:
    return Checkpoints(checkpoints_of(folder))


def _remedy(folder: pathlib.Path, step: int | None) -> str:
    if step is None:
        return "no earlier checkpoint of the run is whole"
    return f"the newest earlier one that is whole is {checkpoints_of(folder) / str(step)}"


def _needs_labels(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether a run is scored by labels; also where there is no run, as is said later."""
    try:
        return load_run_config(find_checkpoint(pathlib.Path(checkpoint))[0]).model.of_kind.needs_labels
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
) -> CheckpointScores:
    """Scores a split with a checkpoint's model; see ``restore_run`` and ``RestoredRun.scores``."""
    if data is not None and not is_fae_folder(data) and _needs_labels(checkpoint):
        Schema.load(data).check_labels()
    run = restore_run(checkpoint, data, devices=devices, plan=plan)
    return CheckpointScores(
        step=run.saved.step,
        scores=run.scores(split, limit=limit),
        schema=run.schema,
        trained_on=run.trained_on,
        config=run.config,
        parameters=run_parameters(run.run),
    )
