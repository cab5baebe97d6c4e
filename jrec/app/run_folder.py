"""The folder of a run: which process may write to it, and whether a resumed run is the run that began there.

RUN/config.toml     the resolved configuration
RUN/dataset.json    the identity of the dataset, see jrec.app.run_dataset
RUN/initial.json    the checkpoint that it began from, see jrec.app.initial
RUN/kernels.json    which GPU kernels it uses, see jrec.app.commands.kernel_check
RUN/catalogue       of two towers, the items that are ranked, see jrec.app.models.catalogue
RUN/checkpoints/    see jrec.checkpoint
RUN/metrics.jsonl, timing.jsonl, tensorboard/
RUN/report/         report.html and metrics.json, written at the end

Commands also take a folder of checkpoints that ``Run.save`` wrote: what they need to know of it is in its checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from jrec.app.config import DataConfig, ModelConfig, TrainConfig, differences, load_config, save_config
from jrec.app.report.logs import METRICS_FILE, TENSORBOARD_FOLDER, TIMING_FILE
from jrec.app.report.trackers import TRACKERS_FOLDER
from jrec.data.identity import Identity
from jrec.errors import CheckpointError, ConfigError, OutputError
from jrec.files import load_toml
from jrec.outputs import Place, check_output, kind_of, new_folder, open_lock, try_lock, writing

if TYPE_CHECKING:
    from jrec.data.schema import Schema
    from jrec.run.record import Record

CONFIG_FILE = "config.toml"
DATASET_FILE = "dataset.json"
INITIAL_FILE = "initial.json"
KERNELS_FILE = "kernels.json"
CATALOGUE_FILE = "catalogue"
CHECKPOINT_FOLDER = "checkpoints"
OLD_FOLDERS = ("host_checkpoints", "mesh_checkpoints")  # of earlier versions
REPORT_FOLDER = "report"
TRACE_FILE = "trace.json"
LOCK_FILE = ".lock"
MANIFEST = "manifest.json"  # of a checkpoint, as in ``jrec.checkpoint.manifest``, whose package loads JAX
RUN_FOLDERS = (CHECKPOINT_FOLDER, *OLD_FOLDERS, REPORT_FOLDER, TENSORBOARD_FOLDER, TRACKERS_FOLDER)
"""Folders that a run writes; ``--overwrite`` deletes them."""

_FILES = (
    CATALOGUE_FILE, CONFIG_FILE, DATASET_FILE, INITIAL_FILE, KERNELS_FILE, METRICS_FILE, TIMING_FILE, TRACE_FILE,
    "access",
)  # fmt: skip

# Keys that a resumed run may change: how it is logged and saved, where its rows and files are, and how long it is.
FREE = (
    "log.", "evaluate.", "checkpoint.", "tables.host.", "mesh.", "plan",
    "model.dot_with",  # the checkpoint knows what it came to
    "data.workers", "data.prefetch", "data.cast", "data.steps_per_dispatch", "data.eval_batch_size", "data.path", "out",
    "epochs", "max_steps",  # see jrec.app.run_length
)  # fmt: skip


@contextlib.contextmanager
def open_run_folder(config: TrainConfig, *, resume: bool, overwrite: bool) -> Iterator[pathlib.Path]:
    """Creates or reopens ``config.out``, and holds it against other processes while inside.

    A run that ended before it logged or saved anything, such as one with a plan that does not fit, does not count.

    Args:
      config: The run's configuration.
      resume: Continues a run in that folder where it stopped; begins anew if there is none.
      overwrite: Deletes an existing run in that folder.

    Yields:
      The folder, with the configuration in it.

    Raises:
      ConfigError: If there is a run and neither ``resume`` nor ``overwrite`` is set, or if it began with another
        configuration.
      OutputError: If another process is writing to it, or it lies inside of another work of jrec.
    """
    folder = pathlib.Path(config.out)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        # Under the lock, so that no other process begins a run between this check and what follows from it.
        check_run_folder(config, resume=resume, overwrite=overwrite)
        if overwrite and _holds_run(folder):
            _clear(folder)
        if _holds_run(folder):
            # A resumed run may be given another value (``FREE``); its checkpoints have this one's network.
            stored = load_run_config(folder).model.dot_with
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, dot_with=stored))
        save_config(config, folder / CONFIG_FILE)
        yield folder


@contextlib.contextmanager
def new_run_folder(
    config: TrainConfig, about: Mapping[str, object], *, overwrite: bool, inputs: Iterable[Place]
) -> Iterator[pathlib.Path]:
    """A run that is made at once rather than trained; ``config.out`` appears when the block ends without an exception.

    Args:
      config: The run's configuration.
      about: What is being made; see ``jrec.outputs.new_folder``.
      overwrite: Replaces an existing run there.
      inputs: What it is made of; see ``jrec.outputs.check_output``.

    Yields:
      The folder to write to, with the configuration in it.

    Raises:
      OutputError: If there is a run and ``overwrite`` is not set, it holds files that are not the run's, or a process
        is writing to it.
    """
    folder = pathlib.Path(config.out)
    with contextlib.ExitStack() as stack:
        if kind_of(folder) == "run":
            stack.enter_context(_held(folder))
            # ``new_folder`` replaces the folder as a whole, and with it what a user put there.
            names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}  # but for locks
            if foreign := sorted(names - {*RUN_FOLDERS, *_FILES}):
                raise OutputError(f"{folder} holds {foreign[0]}, which is not of the run; move it away")
        partial = stack.enter_context(new_folder(folder, about, kind="run", overwrite=overwrite, inputs=inputs))
        save_config(config, partial / CONFIG_FILE)
        yield partial


@contextlib.contextmanager
def _held(folder: pathlib.Path) -> Iterator[None]:
    with open_lock(folder / LOCK_FILE) as lock:
        try_lock(lock, f"another process is training in {folder}; wait for it, or choose another folder")
        yield


def load_run_config(folder: pathlib.Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The configuration that a run was begun with; of a folder of ``Run.save``, one to predict with.

    Runs of earlier versions, which know no ``model.dot_with``, had nothing but dot products where they had no dense
    features: "bottom".

    Raises:
      ConfigError: If the file cannot be read, or is not valid.
    """
    path = folder / CONFIG_FILE
    if not path.exists() and holds_checkpoints(folder):
        return recorded_config(folder, overrides)
    model = load_toml(path, error=ConfigError).get("model", {})
    earlier = "dot_with" not in model and (model.get("kind"), model.get("interaction")) == ("dlrm", "dot")
    return load_config(path, [*(["model.dot_with='bottom'"] if earlier else []), *overrides])


def manifests(folder: pathlib.Path) -> list[pathlib.Path]:
    """The manifests of the complete checkpoints in a folder, by ascending step."""
    paths = [path for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()]
    return sorted(paths, key=lambda path: int(path.parent.name))


def holds_checkpoints(folder: pathlib.Path) -> bool:
    """Whether a folder holds checkpoints itself, as ``Run.save`` writes them."""
    return bool(manifests(folder))


def latest_record(folder: pathlib.Path) -> Record:
    """What made the model of the latest checkpoint in a folder.

    Raises:
      CheckpointError: If the checkpoint does not say so, or is damaged.
    """
    from jrec.checkpoint import Saved
    from jrec.run.record import recorded

    return recorded(Saved(manifests(folder)[-1].parent))


def recorded_dataset(folder: pathlib.Path) -> Identity:
    """The dataset whose rows the tables have.

    Raises:
      CheckpointError: If the checkpoint does not say so.
    """
    if (dataset := latest_record(folder).dataset) is None:
        raise CheckpointError(
            f"{folder} does not say which dataset its rows are of, because its run was not fed with a"
            " jrec.data.Loader; feed it with one, or predict and export with the run itself (Run.predict, Run.export)"
        )
    return dataset


def recorded_config(folder: pathlib.Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """A configuration with the model of a folder's latest checkpoint and its dataset, to predict with.

    Raises:
      CheckpointError: If the checkpoint does not say what made its model, or which dataset its rows are of.
      ConfigError: If the overrides are not valid.
    """
    config = TrainConfig(
        data=DataConfig(path=recorded_dataset(folder).path or "."),
        name=re.sub(r"[^\w.+-]|^[.+-]+", "_", folder.name) or "run",
        out=str(folder),
        model=ModelConfig.from_dict(latest_record(folder).model),
    )
    with tempfile.TemporaryDirectory() as place:
        save_config(config, path := pathlib.Path(place) / "run.toml")
        return load_config(path, overrides)


def settled(record: Record, config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration of a folder's model on a dataset, with the capacities of tables that grow.

    Raises:
      ConfigError: If the model takes other float features than the dataset has.
    """
    if record.dense != (have := tuple(feature.name for feature in schema.dense)):
        raise ConfigError(
            f"the model takes the float features {', '.join(record.dense) or 'none'}, but the dataset at"
            f" {config.data.path} has {', '.join(have) or 'none'}; evaluate it on the dataset that it was trained on"
        )
    rows = {table.name: table.table_rows for table in record.tables if table.name in schema.growing}
    return dataclasses.replace(config, tables=config.tables.with_capacities(rows))


def check_run_folder(config: TrainConfig, *, resume: bool, overwrite: bool) -> None:
    """Refuses to write into ``config.out`` if it holds a run that must not be touched.

    Args:
      config: The run's configuration.
      resume: Whether to resume a run in that folder.
      overwrite: Whether to replace a run in that folder.

    Raises:
      ConfigError: If there is a run and neither ``resume`` nor ``overwrite`` is set, or it began with another
        configuration, or the folder is one of ``Run.save``.
    """
    folder = pathlib.Path(config.out)
    check_output(folder)
    if (kind := kind_of(folder)) not in (None, "run"):
        raise ConfigError(f"out={folder} is a finished {kind}, which a run would damage; choose another folder")
    if not (folder / CONFIG_FILE).exists() and holds_checkpoints(folder):
        raise ConfigError(
            f"out={folder} holds checkpoints of Run.save, which a run there would hide; choose another folder, and"
            f" begin from them with init_from={folder}"
        )
    if overwrite or not _holds_run(folder):
        return
    if not resume:
        raise ConfigError(
            f"{folder} holds a run already; go on with --resume, replace it with --overwrite, or choose another"
            " folder with out="
        )
    stored = load_run_config(folder)
    tables = config.tables.with_capacities(stored.tables.capacities)  # open ones were settled at the start
    model, tasks = config.model, stored.model.multi_task.tasks  # as those are
    if not model.multi_task.tasks:
        model = dataclasses.replace(model, multi_task=dataclasses.replace(model.multi_task, tasks=tasks))
    _check_same_run(stored, dataclasses.replace(config, tables=tables, model=model), folder)


def _holds_run(folder: pathlib.Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and began(folder)


def began(folder: pathlib.Path) -> bool:
    """Whether a run there has written its first line of metrics or its first checkpoint."""
    metrics, checkpoints = folder / METRICS_FILE, folder / CHECKPOINT_FOLDER
    return (metrics.is_file() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def find_checkpoint(path: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """The folder of a run, or of ``Run.save``, and the step where the path is one checkpoint of it.

    Raises:
      CheckpointError: If it is neither.
    """
    if (path / CONFIG_FILE).is_file():
        return path, None
    # Before folders of ``Run.save``, whose checkpoints look the same, but have no configuration above them.
    if path.name == CHECKPOINT_FOLDER and (path.parent / CONFIG_FILE).is_file():
        return path.parent, None
    run = path.parent.parent
    if path.parent.name == CHECKPOINT_FOLDER and path.name.isdigit() and (run / CONFIG_FILE).is_file():
        return run, int(path.name)
    if holds_checkpoints(path):
        return path, None
    if path.name.isdigit() and kind_of(path) == "checkpoint":
        return path.parent, int(path.name)
    raise CheckpointError(
        f"{path} is neither a run folder (with {CONFIG_FILE}), nor a folder of checkpoints, nor one checkpoint"
        f" (RUN/{CHECKPOINT_FOLDER}/STEP)"
    )


def checkpoints_of(folder: pathlib.Path) -> pathlib.Path:
    """Where the checkpoints of a folder are: in a run's ``checkpoints``, or in one of ``Run.save`` itself."""
    return folder / CHECKPOINT_FOLDER if (folder / CONFIG_FILE).is_file() else folder


def _clear(folder: pathlib.Path) -> None:
    """Deletes a run's own files, and no others."""
    # A rename takes all checkpoints away at once, and the configuration goes last: what an interruption leaves is a run
    # that has not begun, never one that goes on from some checkpoint of the old one.
    for name in RUN_FOLDERS:
        aside = folder / f".{name}.removed"
        shutil.rmtree(aside, ignore_errors=True)  # of an interruption
        if (folder / name).exists():
            (folder / name).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    # kernels.json is of the run that begins.
    for name in (CATALOGUE_FILE, INITIAL_FILE, METRICS_FILE, TIMING_FILE, TRACE_FILE, CONFIG_FILE):
        (folder / name).unlink(missing_ok=True)


def _check_same_run(old: TrainConfig, new: TrainConfig, folder: pathlib.Path) -> None:
    ordered = ("data.eval_batch_size",) if new.schedule == "fae" else ()  # the loss of evaluation batches decides
    free = tuple(key for key in FREE if key not in ordered)
    changed = {k: v for k, v in differences(old, new).items() if not k.startswith(free)}
    if changed:
        texts = [f"{key} was {before!r} and is {after!r}" for key, (before, after) in changed.items()]
        raise ConfigError(
            f"{folder} was begun with another configuration: {'; '.join(texts)}. Resume with the same values, or choose"
            " another folder with out="
        )
