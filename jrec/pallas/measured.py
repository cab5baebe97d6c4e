"""Tuning entries that were measured on GPUs: ``measured.json`` beside this file, written by ``benchmarks.gpu_tune``.

    python -m benchmarks.gpu_tune --out tuning.jsonl
    python -m benchmarks.gpu_tune --apply tuning.jsonl

The file is a list of objects, one for each GPU, dim, itemsize and kind of kernel: "padded" bags of one length, "ragged"
segments of any, or an "update", which sums ragged segments and applies them at once.

    {"gpu": "NVIDIA H200", "dim": 64, "itemsize": 4, "kind": "update",
     "config": {"chunks": 1, "unroll": 8, "split": 32},
     "evidence": {"us": 20.1, "default_us": 24.3, "spread": 0.01, "case": "…", "commit": "…", "driver": "…"}}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from types import MappingProxyType

from jrec.json_values import JsonMapping
from jrec.outputs import write_file

PATH = pathlib.Path(__file__).with_name("measured.json")

Key = tuple[str, int, int, str]
"""The device's name as JAX gives it, dim, bytes of an element, and the kind of kernel: one of ``KINDS``."""

KINDS = ("padded", "ragged", "update")
_TYPES = {"gpu": str, "dim": int, "itemsize": int, "kind": str, "config": dict, "evidence": dict}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A config that won on a GPU.

    Attributes:
      config: Fields of ``TuningConfig`` by name; those that are missing keep their defaults.
      evidence: Microseconds of this config and of the default, their spread, the case, the commit, and the driver.
    """

    config: Mapping[str, int | bool]
    evidence: JsonMapping


@functools.cache
def entries() -> Mapping[Key, Entry]:
    """The entries that jrec ships with; read once."""
    return MappingProxyType(read(PATH))


def read(path: pathlib.Path) -> dict[Key, Entry]:
    """The entries of a file.

    Raises:
      ValueError: For a file that is no list of such objects, or has two entries for one key.
    """
    entries: dict[Key, Entry] = {}
    objects = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(objects, list):
        raise ValueError(f"{path}: tuning entries are a list, not {type(objects).__name__}")
    for number, fields in enumerate(objects):
        if not isinstance(fields, dict) or any(not isinstance(fields.get(k), t) for k, t in _TYPES.items()):
            raise ValueError(f"{path}: entry {number} needs {', '.join(_TYPES)}; it is {fields!r}")
        if fields["kind"] not in KINDS:
            raise ValueError(f"{path}: entry {number} is of kind {fields['kind']!r}, not one of {', '.join(KINDS)}")
        key = fields["gpu"], fields["dim"], fields["itemsize"], fields["kind"]
        if key in entries:
            raise ValueError(f"{path}: entry {number} is the second one for {key}; remove one")
        entries[key] = Entry(config=fields["config"], evidence=fields["evidence"])
    return entries


def write(path: pathlib.Path, made: Mapping[Key, Entry]) -> None:
    """Writes entries in a fixed order, one a line, so that changes read well."""
    lines = []
    for (gpu, dim, itemsize, kind), entry in sorted(made.items()):
        fields = {"gpu": gpu, "dim": dim, "itemsize": itemsize, "kind": kind}
        lines.append(json.dumps({**fields, "config": dict(entry.config), "evidence": dict(entry.evidence)}))
    text = "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n" if lines else "[]\n"
    write_file(path, text)
