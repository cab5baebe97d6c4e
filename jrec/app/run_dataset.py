"""The dataset of a run: ``RUN/dataset.json``, written when it begins, checked when it is resumed or evaluated."""

from __future__ import annotations

import dataclasses
import pathlib

from jrec.app.run_folder import DATASET_FILE, began, holds_checkpoints, recorded_dataset
from jrec.data.identity import Identity
from jrec.errors import CheckpointError, ConfigError
from jrec.files import decode, load_json, save_json

FORMAT, VERSION = "jrec-run-dataset", 1


def keep_dataset(folder: pathlib.Path, dataset: Identity, *, resume: bool) -> None:
    """Records the dataset of a run that begins; refuses another dataset for a resumed run.

    Args:
      folder: The run's folder.
      dataset: The dataset to train on.
      resume: Whether to resume a run that began there.

    Raises:
      ConfigError: If the run began with other rows or other examples.
      CheckpointError: If the run does not record its dataset.
    """
    from jrec.run.processes import first  # loads JAX, which check_resumed need not

    if resume and began(folder):
        check_resumed(folder, dataset)
    elif first():
        save_json(folder / DATASET_FILE, dataclasses.asdict(dataset), kind=FORMAT, version=VERSION, sealed=True)


def check_resumed(folder: pathlib.Path, dataset: Identity) -> None:
    """Refuses to resume a run on another dataset.

    Args:
      folder: The run's folder.
      dataset: The dataset to train on.

    Raises:
      ConfigError: If the run began with other rows or other examples.
      CheckpointError: If the run does not record its dataset.
    """
    remedy = (
        "resume with the dataset that the run began with; a new run, in another folder (out=), goes on with its model"
        f" on other examples of the same rows (init_from={folder})"
    )
    run_dataset(folder).check(dataset, subject=f"the run in {folder}", remedy=remedy, error=ConfigError, examples=True)


def check_evaluated(folder: pathlib.Path, dataset: Identity) -> Identity:
    """The dataset that a run was trained on; refuses to evaluate it on a dataset whose rows mean other values.

    Raises:
      CheckpointError: If its rows mean other values, or the run does not record its dataset.
    """
    trained = run_dataset(folder)
    remedy = (
        "evaluate it on the dataset that it was trained on, a copy, or a log that was prepared with --vocabulary-from"
        " that dataset: one prepared by its own numbers rows by its own frequencies"
    )
    trained.check(dataset, subject=f"the run in {folder}", remedy=remedy, error=CheckpointError)
    return trained


def run_dataset(folder: pathlib.Path) -> Identity:
    """The dataset that a run was trained on.

    Raises:
      CheckpointError: If the run does not record its dataset, or the file is damaged.
    """
    path = folder / DATASET_FILE
    if not path.is_file() and holds_checkpoints(folder):
        return recorded_dataset(folder)
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {DATASET_FILE}, which says what dataset the run is of: it was trained by an older jrec;"
            " use that jrec, or train it anew"
        )
    remedy = "copy the run again, or train it anew"
    content = load_json(path, kind=FORMAT, version=VERSION, error=CheckpointError, remedy=remedy, sealed=True)
    return decode(content, Identity, where=str(path), error=CheckpointError, remedy=remedy)
