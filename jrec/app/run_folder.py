"""The folder of a run: which process may write to it, and whether a resumed run is the run that began there.

RUN/config.toml     the resolved configuration
RUN/dataset.json    the identity of the dataset, see jrec.app.run_record
RUN/initial.json    the checkpoint that it began from, likewise
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
import shutil
from collections.abc import Iterable, Iterator, Mapping

from jrec.app.config import TrainConfig, differences, save_config
from jrec.app.report.logs import METRICS_FILE, TENSORBOARD_FOLDER, TIMING_FILE
from jrec.app.report.trackers import TRACKERS_FOLDER
from jrec.app.run_record import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    DATASET_FILE,
    INITIAL_FILE,
    SavedRun,
    TrainedRun,
    find_run,
    run_at,
)
from jrec.errors import ConfigError, OutputError
from jrec.outputs import Place, check_output, kind_of, new_folder, open_lock, try_lock, writing

KERNELS_FILE = "kernels.json"
CATALOGUE_FILE = "catalogue"
OLD_FOLDERS = ("host_checkpoints", "mesh_checkpoints")  # of earlier versions
REPORT_FOLDER = "report"
TRACE_FILE = "trace.json"
LOCK_FILE = ".lock"
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
            stored = TrainedRun(folder).config().model.dot_with
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


def check_run_folder(config: TrainConfig, *, resume: bool, overwrite: bool) -> None:
    """Refuses to write into ``config.out`` if it holds a run that must not be touched.

    Args:
      config: The run's configuration, with the tasks and numbers that the dataset settles.
      resume: Whether to resume a run in that folder.
      overwrite: Whether to replace a run in that folder.

    Raises:
      ConfigError: If there is a run and neither ``resume`` nor ``overwrite`` is set, or it began with another
        configuration, or the folder is one of ``Run.save``, or of the run that this one is to begin from.
    """
    folder = pathlib.Path(config.out)
    check_output(folder)
    if (kind := kind_of(folder)) not in (None, "run"):
        raise ConfigError(f"out={folder} is a finished {kind}, which a run would damage; choose another folder")
    if isinstance(run_at(folder), SavedRun):
        raise ConfigError(
            f"out={folder} holds checkpoints of Run.save, which a run there would hide; choose another folder, and"
            f" begin from them with init_from={folder}"
        )
    if not _holds_run(folder):
        return
    if overwrite:
        _check_begins_elsewhere(config, folder)
        return
    if not resume:
        raise ConfigError(
            f"{folder} holds a run already; go on with --resume, replace it with --overwrite, or choose another"
            " folder with out="
        )
    stored = TrainedRun(folder).config()
    tables = config.tables.with_capacities(stored.tables.capacities)  # open ones were settled at the start
    _check_same_run(stored, dataclasses.replace(config, tables=tables), folder)


def _check_begins_elsewhere(config: TrainConfig, folder: pathlib.Path) -> None:
    """Refuses to replace the run that another is to begin from."""
    if config.init_from and find_run(config.init_from)[0].folder.resolve() == folder.resolve():
        raise ConfigError(
            f"--overwrite would delete the run in {folder}, from which this one is to begin"
            f" (init_from={config.init_from}); choose another folder with out="
        )


def _holds_run(folder: pathlib.Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and TrainedRun(folder).began


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
