"""Files that appear whole or not at all, and JSON files that say of what format and version they are."""

from __future__ import annotations

import hashlib
import json
import math
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


def save_json(path: pathlib.Path, content: Mapping[str, Any], *, kind: str, version: int, sealed: bool = False) -> None:
    """Writes a file that ``load_json`` reads.

    Args:
      path: The file, whose folder exists.
      content: JSON types, finite.
      kind: The file's "format".
      version: The version of this format.
      sealed: Whether a checksum is added, so that a file that was edited or damaged is refused.
    """
    whole = {"format": kind, "version": version, **content}
    if sealed:
        whole["sha256"] = _seal(whole)
    write_atomically(path, f"{json.dumps(whole, indent=1, allow_nan=False)}\n".encode())


def load_json(
    path: pathlib.Path, *, kind: str, version: int, error: type[JrecError], remedy: str, sealed: bool = False
) -> dict[str, Any]:
    """The content that ``save_json`` was given.

    Args:
      path: The file.
      kind: The format that it must have.
      version: The one version that is read.
      error: What is raised.
      remedy: What a message advises.
      sealed: Whether it was saved with a checksum.

    Raises:
      JrecError: As ``error``, if the file is missing, damaged, or of another format or version.
    """
    try:
        content = parse_json(path.read_bytes())
        format_and_version = (content["format"], content["version"])
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}); {remedy}") from problem
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as problem:
        raise error(f"{path} is damaged or no {kind} file ({problem!r}); {remedy}") from problem
    if format_and_version != (kind, version) or type(content["version"]) is not int:
        raise error(
            f"{path} is of format {content['format']!r} version {content['version']!r}, but this jrec reads {kind!r}"
            f" version {version}; {remedy}, or use the jrec that made it"
        )
    if sealed and content.pop("sha256", None) != _seal(content):
        raise error(f"{path} was edited or damaged: its checksum does not fit; {remedy}")
    del content["format"], content["version"]
    return content


def parse_json(text: bytes | str) -> Any:
    """JSON whose numbers are finite and whose integers fit 64 bits.

    Raises:
      ValueError: If the text is something else.
      RecursionError: If it is nested more deeply than any file of jrec.
    """
    return json.loads(text, parse_constant=_refuse_number, parse_int=_int64, parse_float=_finite)


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is no number that a file of jrec holds")


def _int64(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**63:
        _refuse_number(text)
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: pathlib.Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decode[T](
    content: Any, kind: type[T], *, where: str, error: type[JrecError], remedy: str, partial: bool = False
) -> T:
    """A dataclass of JSON content, whose types and keys are checked.

    Args:
      content: JSON types, as ``json.loads`` returns them.
      kind: A dataclass of what JSON can hold: numbers, strings, mappings, tuples, other dataclasses.
      where: The file, for messages.
      error: What is raised.
      remedy: What a message advises.
      partial: Whether keys with a default may be missing.

    Raises:
      JrecError: As ``error``, if a value has another type than it should, or a key is missing or unknown.
    """
    import msgspec

    try:
        value = msgspec.convert(content, kind, strict=True)
        back = msgspec.to_builtins(value)
    except (msgspec.ValidationError, RecursionError, OverflowError) as problem:
        raise error(f"{where} does not hold what it should: {problem}; {remedy}") from problem
    if (place := _difference(content, back, partial)) is not None:
        raise error(f"{where} does not hold what it should: {place} is unknown or missing; {remedy}")
    return value


def _difference(one: Any, other: Any, partial: bool, place: str = "$") -> str | None:
    """The first place where content differs from its decoded form: a key that is unknown, or was filled in."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | (set() if partial else other.keys()):
            if key not in one or key not in other:
                return f"{place}.{key}"
            if (found := _difference(one[key], other[key], partial, f"{place}.{key}")) is not None:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            if (found := _difference(a, b, partial, f"{place}[{i}]")) is not None:
                return found
        return None
    return None if one == other else place
