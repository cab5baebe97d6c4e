"""What the processes of one run must have in common, as text by name; ``jrec.train.meeting`` compares it."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

from jrec import environment
from jrec.data.fae import MANIFEST_FILE
from jrec.data.schema import SCHEMA_FILE
from jrec.train.config import TrainConfig
from jrec.train.dataset import RunData
from jrec.train.run_folder import CONFIG_FILE

_OWN = ("log.", "name", "out", "plan", "data.path", "data.workers", "data.prefetch", "tables.host.")
"""Keys that every process may have its own value of: how it shows and loads, and where files lie on its machine."""


def training_facts(config: TrainConfig, data: RunData, *, resume: bool, overwrite: bool) -> dict[str, str]:
    """What processes that train must have in common.

    Args:
      config: The run's configuration.
      data: The run's dataset.
      resume, overwrite: What becomes of a run in the folder.
    """
    facts = _versions()
    facts |= {key: _text(value) for key, value in config.flatten().items() if not key.startswith(_OWN)}
    facts |= {"--resume": _text(resume), "--overwrite": _text(overwrite), "the dataset": dataset_digest(data)}
    return facts | ({"the plan": file_digest(config.plan)} if config.plan else {})


def evaluation_facts(checkpoint: str, data: str, plan: str, **options: Any) -> dict[str, str]:
    """What processes that evaluate must have in common.

    Args:
      checkpoint: A run folder, or one of its checkpoints.
      data: The dataset's folder.
      plan: The plan's file, or "" for none.
      **options: The command's other options by name.
    """
    facts = _versions() | {f"--{name}": _text(value) for name, value in options.items()}
    place = pathlib.Path(checkpoint)
    stored = next((p for p in (place / CONFIG_FILE, place.parent.parent / CONFIG_FILE) if p.is_file()), None)
    facts["the run's configuration"] = file_digest(stored) if stored else "absent"
    facts["the dataset"] = file_digest(pathlib.Path(data) / SCHEMA_FILE)
    return facts | ({"the plan": file_digest(plan)} if plan else {})


def dataset_digest(data: RunData) -> str:
    """The dataset's name and a digest that tells it from others."""
    folder = pathlib.Path(data.config.data.path)
    path = folder / SCHEMA_FILE if data.packed is None else data.packed.folder / MANIFEST_FILE
    return f"{data.schema.name} {file_digest(path)}"


def file_digest(path: str | pathlib.Path) -> str:
    """The first digits of the SHA-256 of a file's content."""
    try:
        with pathlib.Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _versions() -> dict[str, str]:
    installed = environment.versions()
    return {f"the version of {name}": installed[name] for name in ("jrec", "jax", "jaxlib")}


def _text(value: Any) -> str:
    return json.dumps(value, default=str)
