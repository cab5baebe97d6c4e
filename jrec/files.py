"""Files that appear whole or not at all, and JSON files that say of what format and version they are."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jrec.errors import JrecError


def write_atomically(path: pathlib.Path, content: bytes | memoryview) -> None:
    """Writes a file that appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_json(path: pathlib.Path, content: Mapping[str, Any], *, kind: str, version: int) -> None:
    """Writes a file that ``load_json`` reads.

    Args:
      path: of the file, whose folder exists.
      content: in JSON types, finite.
      kind: of the file, its "format".
      version: of this format.
    """
    text = json.dumps({"format": kind, "version": version, **content}, indent=1, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())


def load_json(path: pathlib.Path, *, kind: str, version: int, error: type[JrecError], remedy: str) -> dict[str, Any]:
    """The content that ``save_json`` was given.

    Args:
      path: of the file.
      kind: the format that it must be of.
      version: the one version that is read.
      error: what is raised.
      remedy: what a message advises.

    Raises:
      JrecError: as ``error``, if the file is missing, damaged, or of another format or version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = (content.pop("format"), content.pop("version"))
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}); {remedy}") from problem
    except (ValueError, KeyError, AttributeError, TypeError) as problem:
        raise error(f"{path} is damaged or no {kind} file ({problem!r}); {remedy}") from problem
    if found != (kind, version):
        raise error(
            f"{path} is of format {found[0]!r} version {found[1]!r}, but this jrec reads {kind!r} version {version};"
            f" {remedy}, or use the jrec that made it"
        )
    return content
