"""JSON and TOML files that say of what format and version they are, and are decoded by types."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jrec.errors import JrecError
from jrec.json_values import JsonObject
from jrec.outputs import write_file

_LONGEST = 80  # characters of a value that a message shows
_LONGEST_NAME = 255  # bytes of a file's name on the file systems in use


def save_json(
    path: pathlib.Path, content: Mapping[str, object], *, kind: str, version: int, sealed: bool = False
) -> None:
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
    write_file(path, f"{json.dumps(whole, indent=1, allow_nan=False)}\n")


def load_json(
    path: pathlib.Path, *, kind: str, version: int, error: type[JrecError], remedy: str, sealed: bool = False
) -> JsonObject:
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
    """JSON of valid Unicode, whose numbers are finite and whose integers fit 64 bits.

    Raises:
      ValueError: If the text is something else.
      RecursionError: If it is nested more deeply than any file of jrec.
    """
    content = json.loads(text, parse_constant=_refuse_number, parse_int=_int64, parse_float=_finite)
    json.dumps(content, ensure_ascii=False).encode()  # an escape can be half of a character
    return content


def load_toml(path: str | os.PathLike[str], *, error: type[JrecError]) -> JsonObject:
    """The nested tables of a TOML file.

    Raises:
      JrecError: As ``error``, if the file cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(pathlib.Path(path).read_bytes().decode("utf-8"))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not UTF-8 text ({problem.reason} at byte {problem.start})") from problem
    except (ValueError, RecursionError) as problem:  # ValueError also for integers of thousands of digits
        raise error(f"{path}: not valid TOML: {problem}") from problem


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is no number that a file of jrec holds")


def _int64(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**63:
        _refuse_number(text)
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _seal(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def stays_inside(path: str) -> bool:
    """Whether the path of a file that another one names is relative and normalized, with no way out of the folder."""
    pure = pathlib.PurePosixPath(path)
    if str(pure) != path or path == "." or pure.is_absolute() or "\0" in path:
        return False
    return all(part != ".." and len(part.encode(errors="replace")) <= _LONGEST_NAME for part in pure.parts)


def sha256_of(path: pathlib.Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decode[T](
    content: object,
    kind: type[T],
    *,
    where: str,
    error: Callable[[str], JrecError],
    remedy: str,
    partial: bool = False,
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

    advice = f"; {remedy}" if remedy else ""
    try:
        if (path := _unsound(content)) is not None:
            raise error(f"{where}: {_dotted(path)} must be a finite number of at most 64 bits{advice}")
        value = msgspec.convert(content, kind, strict=True)
        # And back again: msgspec ignores keys that a class has not, and fills in those that have a default.
        back = dataclasses.asdict(value)  # pyright: ignore[reportArgumentType]
    except (msgspec.ValidationError, RecursionError) as problem:
        fault = problem.__cause__ if isinstance(problem.__cause__, JrecError) else _in_words(str(problem), content)
        raise error(f"{where}: {fault}{advice}") from problem
    if (path := _difference(content, back, partial)) is not None:
        raise error(f"{where}: {_odd_key(content, back, path)}{advice}")
    return value


_WORDS = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "an array",
          "object": "a table", "null": "nothing"}  # fmt: skip
_Path = tuple[str | int, ...]


def _in_words(message: str, content: object) -> str:
    """A message of msgspec, such as "Expected `int`, got `str` - at `$.tables[0].rows`", as jrec's messages are."""
    fault, _, place = message.partition(" - at ")
    where = place.strip("`").removeprefix("$").removeprefix(".")
    value = _value_at(content, where)
    if match := re.fullmatch(r"Object missing required field `(.+)`", fault):
        near = difflib.get_close_matches(match[1], list(value), n=1) if isinstance(value, dict) else []
        return f"{f'{where}.' if where else ''}{match[1]} is missing" + (f", but there is {near[0]}" if near else "")
    if match := re.fullmatch(r"Expected `(.+)`, got `(.+)`", fault):
        wanted = " or ".join(_WORDS.get(name, name) for name in match[1].split(" | "))
        text = repr(value) if isinstance(value, str | int | float) else ""
        shown = text if text and len(text) <= _LONGEST else _WORDS.get(match[2], match[2])
        return f"{where or 'the file'} must be {wanted}, but is {shown}"
    return f"{where}: {fault}" if where else fault


def _value_at(content: Any, where: str) -> object:
    """The value at a place of msgspec's, such as "tables[0].rows"; None where the place does not say."""
    try:
        for key, index in re.findall(r"([^.\[\]]+)(?![^\[]*\])|\[([0-9]+)\]", where):
            content = content[key] if key else content[int(index)]
    except (LookupError, TypeError):
        return None
    return None if "[..." in where else content


def _dotted(path: _Path) -> str:
    """A path as messages name it: tables[0].rows."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _unsound(content: object, path: _Path = ()) -> _Path | None:
    """The path to a number that is not finite, or an integer of more than 64 bits; None where there is none."""
    if isinstance(content, dict | list | tuple):
        steps = content if isinstance(content, dict) else range(len(content))
        return next((bad for s in steps if (bad := _unsound(content[s], (*path, s))) is not None), None)
    if isinstance(content, float):
        return None if math.isfinite(content) else path
    return path if isinstance(content, int) and not -(2**63) <= content < 2**63 else None


def _odd_key(content: Any, back: Any, path: _Path) -> str:
    """What to say of a key that decoding did not know, or filled in."""
    *parents, key = path
    for step in parents:
        content, back = content[step], back[step]
    place = _dotted(path)
    if not isinstance(back, dict) or key in back:
        return (
            f"{place} is {'missing' if isinstance(content, dict) and key not in content else 'not as it was written'}"
        )
    near = difflib.get_close_matches(str(key), list(back), n=1, cutoff=0.0)
    return f"unknown key {place}" + (f"; did you mean {near[0]}? Keys: {', '.join(back)}" if near else "")


def _difference(one: Any, other: Any, partial: bool, path: _Path = ()) -> _Path | None:
    """The path to the first place where content differs from its decoded form; None where none does."""
    steps: Iterable[str | int] = ()
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(() if partial else other)):
            if key not in one or key not in other:
                return (*path, key)
        steps = one
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        steps = range(len(one))
    elif one != other:
        return path
    return next((d for s in steps if (d := _difference(one[s], other[s], partial, (*path, s))) is not None), None)
