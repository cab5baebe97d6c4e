"""Facts that must be equal in all processes of a run, as text by name; ``jrec.app.processes.meeting`` compares them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

from jrec import environment
from jrec.app.config import TrainConfig
from jrec.app.dataset import RunData
from jrec.app.run_record import CONFIG_FILE, MANIFEST, manifests
from jrec.data.fae.manifest import MANIFEST_FILE
from jrec.data.schema import SCHEMA_FILE
from jrec.files import sha256_of

_OWN = (
    "log.",
    "name",
    "out",
    "plan",
    "data.path",
    "data.workers",
    "data.prefetch",
    "data.steps_per_dispatch",
    "tables.host.",
)
"""Keys that may differ between processes: progress and loading, and the places of files on each machine."""


def training_facts(config: TrainConfig, data: RunData, flags: Mapping[str, object]) -> dict[str, str]:
    """Facts that must be equal in all processes that train.

    Args:
      config: The run's configuration.
      data: The run's dataset.
      flags: The command's options by name, such as what to do with an existing run in the folder.
    """
    facts = _versions()
    facts |= {key: _text(value) for key, value in config.flatten().items() if not key.startswith(_OWN)}
    facts |= {f"--{name}": _text(value) for name, value in flags.items()} | _dataset(data)
    return facts | ({"the plan": file_digest(config.plan)} if config.plan else {})


def evaluation_facts(checkpoint: str, data: str, plan: str, **options: object) -> dict[str, str]:
    """Facts that must be equal in all processes that evaluate.

    Args:
      checkpoint: A run folder, or one of its checkpoints.
      data: The dataset's folder.
      plan: The plan's file, or "" for none.
      **options: The command's other options by name.
    """
    facts = _versions() | {f"--{name}": _text(value) for name, value in options.items()}
    place = pathlib.Path(checkpoint)
    # A run's folder, one of its checkpoints, one checkpoint of ``Run.save``, or a folder of these, by the latest.
    places = (place / CONFIG_FILE, place.parent.parent / CONFIG_FILE, place / MANIFEST, *manifests(place)[-1:])
    stored = next((p for p in places if p.is_file()), None)
    facts["the run's configuration"] = file_digest(stored) if stored else "absent"
    described = next((p for name in (SCHEMA_FILE, MANIFEST_FILE) if (p := pathlib.Path(data) / name).is_file()), None)
    facts["the dataset"] = file_digest(described) if described else "absent"
    return facts | ({"the plan": file_digest(plan)} if plan else {})


def file_digest(path: str | pathlib.Path) -> str:
    """The first digits of the SHA-256 of a file's content."""
    try:
        return sha256_of(pathlib.Path(path))[:16]
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _dataset(data: RunData) -> dict[str, str]:
    """The dataset's digests; each process may have it in another place."""
    digests = data.schema.identity.digests
    if data.packed is not None:
        digests = digests | {"hot and cold examples": data.packed.identity}
    return {f"the dataset's digest of {part}": digest[:16] for part, digest in digests.items()}


def _versions() -> dict[str, str]:
    installed = environment.versions()
    return {f"the version of {name}": installed[name] for name in ("jrec", "jax", "jaxlib")}


def _text(value: object) -> str:
    return json.dumps(value, default=str)
