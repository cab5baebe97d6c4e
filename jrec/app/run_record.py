"""What a run is: its configuration, dataset, checkpoints and origin, as its folder says them.

`jrec train` writes them as files (``TrainedRun``); a folder of ``Run.save`` has them in its checkpoints (``SavedRun``).
Whoever opens a folder asks its record, and need not know which of the two it is. This module imports no JAX.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, override

from jrec.app.config import DataConfig, ModelConfig, TrainConfig, load_config, save_config
from jrec.app.report.logs import METRICS_FILE
from jrec.data.identity import Identity
from jrec.errors import CheckpointError, ConfigError
from jrec.files import decode, load_json, load_toml, save_json
from jrec.outputs import kind_of

if TYPE_CHECKING:
    from jrec.data.schema import Schema
    from jrec.ops.layout import EmbeddingLayout
    from jrec.run.record import Record
    from jrec.sharding import Plan

CONFIG_FILE = "config.toml"
DATASET_FILE = "dataset.json"
INITIAL_FILE = "initial.json"
CHECKPOINT_FOLDER = "checkpoints"
MANIFEST = "manifest.json"  # of a checkpoint, as in ``jrec.checkpoint.manifest``, whose package loads JAX
_DATASET, _INITIAL, _VERSION = "jrec-run-dataset", "jrec-run-initial", 1
_COPY = "copy the run again, or train it anew"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initial:
    """The checkpoint that a run begins from (``init_from``): its model, rows and slots, on data of the same rows.

    Attributes:
      run: The folder of its run.
      step: Its step in that run.
      optimizer_step: Steps that its optimizer has taken, those before that run included; 0 of a folder of ``Run.save``,
        since the dense optimizer, which counts them, begins anew.
    """

    run: str
    step: int
    optimizer_step: int

    @property
    def record(self) -> RunRecord:
        """Its run."""
        return record_of(pathlib.Path(self.run))


class RunRecord(abc.ABC):
    """A run, by its folder.

    Args:
      folder: The folder.

    Attributes:
      checkpoints: The folder of its checkpoints.
      keeps_dense_optimizer: Whether its checkpoints go on with the dense optimizer's state, too. A run that begins from
        a folder of ``Run.save`` takes over its model, rows and slots; the dense optimizer begins anew.
      made: What made the model; None where the configuration says so.
    """

    checkpoints: pathlib.Path
    keeps_dense_optimizer: ClassVar[bool] = True
    made: Record | None = None

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    @abc.abstractmethod
    def config(self, overrides: Iterable[str] = ()) -> TrainConfig:
        """The configuration that the run was begun with; of a folder of ``Run.save``, one to predict with.

        Raises:
          ConfigError: If the file cannot be read, or the configuration is not valid.
          CheckpointError: If a checkpoint does not say what it must.
        """

    @property
    @abc.abstractmethod
    def dataset(self) -> Identity:
        """The dataset that the run was trained on, whose rows its tables have.

        Raises:
          CheckpointError: If the run does not record it, or the file is damaged.
        """

    @abc.abstractmethod
    def tables(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> tuple[TrainConfig, EmbeddingLayout]:
        """The run's tables on a dataset, and the configuration with what they settle in it.

        Raises:
          ConfigError: If the model does not fit the dataset.
        """

    def optimizer_steps(self, step: int) -> int:
        """How many steps the dense optimizer has taken at a step of the run."""
        del step
        return 0

    def chosen_step(self) -> int | None:
        """The step of the best checkpoint where the run keeps that (``checkpoint.keep_best``), else of the latest.

        Returns:
          The step; None where there is no checkpoint.
        """
        from jrec.checkpoint import Checkpoints, Saved
        from jrec.run.identity import meta_of

        checkpoints = Checkpoints(self.checkpoints)
        if (latest := checkpoints.latest_step()) is None:
            return None
        best = meta_of(Saved(checkpoints.folder / str(latest))).get("best", {}).get("step")
        return best if self.config().checkpoint.keep_best and best in checkpoints.steps() else latest

    def check_resumed(self, dataset: Identity) -> None:
        """Refuses to resume the run on another dataset.

        Raises:
          ConfigError: If the run began with other rows or other examples.
          CheckpointError: If the run does not record its dataset.
        """
        remedy = (
            "resume with the dataset that the run began with; a new run, in another folder (out=), goes on with its"
            f" model on other examples of the same rows (init_from={self.folder})"
        )
        subject = f"the run in {self.folder}"
        self.dataset.check(dataset, subject=subject, remedy=remedy, error=ConfigError, examples=True)

    def check_evaluated(self, dataset: Identity) -> Identity:
        """The dataset that the run was trained on; refuses to evaluate it on one whose rows mean other values.

        Raises:
          CheckpointError: If its rows mean other values, or the run does not record its dataset.
        """
        remedy = (
            "evaluate it on the dataset that it was trained on, a copy, or a log that was prepared with"
            " --vocabulary-from that dataset: one prepared by its own numbers rows by its own frequencies"
        )
        trained_on = self.dataset
        trained_on.check(dataset, subject=f"the run in {self.folder}", remedy=remedy, error=CheckpointError)
        return trained_on


class TrainedRun(RunRecord):
    """A run of `jrec train`, in files: ``config.toml``, ``dataset.json``, ``initial.json``, ``checkpoints/``."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        self.checkpoints = folder / CHECKPOINT_FOLDER

    @override
    def config(self, overrides: Iterable[str] = ()) -> TrainConfig:
        path = self.folder / CONFIG_FILE
        model = load_toml(path, error=ConfigError).get("model", {})
        # Runs of earlier versions, which know no ``model.dot_with``, had nothing but dot products without dense
        # features: "bottom".
        earlier = "dot_with" not in model and (model.get("kind"), model.get("interaction")) == ("dlrm", "dot")
        return load_config(path, [*(["model.dot_with='bottom'"] if earlier else []), *overrides])

    @property
    @override
    def dataset(self) -> Identity:
        if not (path := self.folder / DATASET_FILE).is_file():
            raise CheckpointError(
                f"{self.folder} has no {DATASET_FILE}, which says what dataset the run is of: it was trained by an"
                " older jrec; use that jrec, or train it anew"
            )
        return _read(path, _DATASET, Identity)

    @override
    def tables(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> tuple[TrainConfig, EmbeddingLayout]:
        return config, config.model.of_kind.layout(config, schema, plan)

    @override
    def optimizer_steps(self, step: int) -> int:
        if not self.config().init_from:
            return step
        return step + _read(self.folder / INITIAL_FILE, _INITIAL, Initial).optimizer_step

    @property
    def began(self) -> bool:
        """Whether it has written its first line of metrics or its first checkpoint."""
        metrics = self.folder / METRICS_FILE
        return (metrics.is_file() and metrics.stat().st_size > 0) or (
            self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        )

    def keep_dataset(self, dataset: Identity, *, resume: bool = False) -> None:
        """Records the dataset of a run that begins; refuses another dataset for a resumed run.

        Args:
          dataset: The dataset to train on.
          resume: Whether to resume a run that began here.

        Raises:
          ConfigError: If the run began with other rows or other examples.
          CheckpointError: If the run does not record its dataset.
        """
        from jrec.run.processes import first  # loads JAX, which check_resumed need not

        if resume and self.began:
            self.check_resumed(dataset)
        elif first():
            _write(self.folder / DATASET_FILE, _DATASET, dataset)

    def keep_initial(self, config: TrainConfig, dataset: Identity, *, resume: bool) -> Initial | None:
        """The checkpoint that the run begins, or began, from; None where ``init_from`` is not set.

        Args:
          config: The run's configuration.
          dataset: The dataset to train on.
          resume: Whether to resume a run that began here, whose folder says what it began from.

        Raises:
          CheckpointError: If there is no such checkpoint.
          ConfigError: If its rows mean other values than the dataset's.
        """
        if not config.init_from:
            return None
        path = self.folder / INITIAL_FILE
        if resume and self.began:
            return _read(path, _INITIAL, Initial)
        check_initial(config, dataset)
        from jrec.run.processes import first  # loads JAX, which check_initial need not

        before, step = find_run(config.init_from)
        step = before.chosen_step() if step is None else step
        if step is None:
            raise CheckpointError(f"init_from: the run in {before.folder} has no complete checkpoint; train it first")
        initial = Initial(run=str(before.folder.absolute()), step=step, optimizer_step=before.optimizer_steps(step))
        if first():
            _write(path, _INITIAL, initial)
        return initial


class SavedRun(RunRecord):
    """A folder of checkpoints that ``Run.save`` wrote; the latest says what the run is."""

    keeps_dense_optimizer: ClassVar[bool] = False

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        self.checkpoints = folder

    @functools.cached_property
    def made(self) -> Record:  # pyright: ignore[reportIncompatibleVariableOverride] (read where it is asked for)
        """What made the model of the latest checkpoint.

        Raises:
          CheckpointError: If the checkpoint does not say so, or is damaged.
        """
        from jrec.checkpoint import Saved
        from jrec.run.record import recorded

        return recorded(Saved(manifests(self.folder)[-1].parent))

    @override
    def config(self, overrides: Iterable[str] = ()) -> TrainConfig:
        config = TrainConfig(
            data=DataConfig(path=self.dataset.path or "."),
            name=re.sub(r"[^\w.+-]|^[.+-]+", "_", self.folder.name) or "run",
            out=str(self.folder),
            model=ModelConfig.from_dict(self.made.model),
        )
        with tempfile.TemporaryDirectory() as place:
            save_config(config, path := pathlib.Path(place) / "run.toml")
            return load_config(path, overrides)

    @property
    @override
    def dataset(self) -> Identity:
        if (dataset := self.made.dataset) is None:
            raise CheckpointError(
                f"{self.folder} does not say which dataset its rows are of, because its run was not fed with a"
                " jrec.data.Loader; feed it with one, or predict and export with the run itself (Run.predict,"
                " Run.export)"
            )
        return dataset

    @override
    def tables(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> tuple[TrainConfig, EmbeddingLayout]:
        del plan
        if self.made.dense != (have := tuple(feature.name for feature in schema.dense)):
            raise ConfigError(
                f"the model takes the float features {', '.join(self.made.dense) or 'none'}, but the dataset at"
                f" {config.data.path} has {', '.join(have) or 'none'}; evaluate it on the dataset that it was trained"
                " on"
            )
        rows = {table.name: table.table_rows for table in self.made.tables if table.name in schema.growing}
        config = dataclasses.replace(config, tables=config.tables.with_capacities(rows))
        return config, self.made.layout(planned=config.planned)


def run_at(folder: pathlib.Path) -> RunRecord | None:
    """The run of a folder; None where there is none."""
    if (folder / CONFIG_FILE).is_file():
        return TrainedRun(folder)
    return SavedRun(folder) if manifests(folder) else None


def record_of(folder: pathlib.Path) -> RunRecord:
    """The run of a folder; of one that is neither, a ``TrainedRun``, whose files are missing."""
    return run_at(folder) or TrainedRun(folder)


def find_run(path: str | pathlib.Path) -> tuple[RunRecord, int | None]:
    """The run of a folder, and the step where the path is one of its checkpoints.

    Args:
      path: A run's folder, a folder of ``Run.save``, or one checkpoint in either.

    Raises:
      CheckpointError: If it is none of these.
    """
    path = pathlib.Path(path)
    if (path / CONFIG_FILE).is_file():
        return TrainedRun(path), None
    # Before folders of ``Run.save``, whose checkpoints look the same, but have no configuration above them.
    if path.name == CHECKPOINT_FOLDER and (path.parent / CONFIG_FILE).is_file():
        return TrainedRun(path.parent), None
    run = path.parent.parent
    if path.parent.name == CHECKPOINT_FOLDER and path.name.isdigit() and (run / CONFIG_FILE).is_file():
        return TrainedRun(run), int(path.name)
    if manifests(path):
        return SavedRun(path), None
    if path.name.isdigit() and kind_of(path) == "checkpoint":
        return SavedRun(path.parent), int(path.name)
    raise CheckpointError(
        f"{path} is neither a run folder (with {CONFIG_FILE}), nor a folder of checkpoints, nor one checkpoint"
        f" (RUN/{CHECKPOINT_FOLDER}/STEP)"
    )


def check_initial(config: TrainConfig, dataset: Identity) -> None:
    """Refuses to begin from a run that is none, or whose rows mean other values.

    Raises:
      CheckpointError: If ``init_from`` is no run or checkpoint, or does not record its dataset.
      ConfigError: If its rows mean other values than the dataset's.
    """
    if not config.init_from:
        return
    before, _ = find_run(config.init_from)
    remedy = f"prepare the log with --vocabulary-from {before.dataset.path}, or begin without init_from"
    subject = f"init_from: the run in {before.folder}"
    before.dataset.check(dataset, subject=subject, remedy=remedy, error=ConfigError)


def manifests(folder: pathlib.Path) -> list[pathlib.Path]:
    """The manifests of the complete checkpoints in a folder, by ascending step."""
    paths = [path for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()]
    return sorted(paths, key=lambda path: int(path.parent.name))


def _read[T](path: pathlib.Path, kind: str, cls: type[T]) -> T:
    content = load_json(path, kind=kind, version=_VERSION, error=CheckpointError, remedy=_COPY, sealed=True)
    return decode(content, cls, where=str(path), error=CheckpointError, remedy=_COPY)


def _write(path: pathlib.Path, kind: str, content: Identity | Initial) -> None:
    save_json(path, dataclasses.asdict(content), kind=kind, version=_VERSION, sealed=True)
