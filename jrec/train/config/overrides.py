"""Reading a TOML file and laying ``section.key=value`` arguments of the command line over it."""

from __future__ import annotations

import difflib
import json
import os
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from jrec.errors import ConfigError
from jrec.files import load_toml
from jrec.train.config.typed_toml import Origins, leaves

_DEEPEST = 16  # keys of an override; no key of a configuration is nested as deeply


def read_tables(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> tuple[dict[str, Any], Origins]:
    """The nested tables of a TOML file with overrides applied, and where each value came from.

    Args:
      path: The TOML file.
      overrides: ``key=value`` with a dotted key. The value is TOML, or else a bare string. Tables are merged key by
        key, and the last override of a key wins.

    Raises:
      ConfigError: If the file is absent or no TOML, or an override is not ``key=value``.
    """
    content = _read(pathlib.Path(path))
    setters: dict[str, str] = {}
    raw: dict[str, str] = {}
    for text in overrides:
        table, right = _parse(text)
        _merge(content, table, text)
        for key, _ in leaves(table):
            setters[key] = text
            raw[key] = right
    return content, Origins(file=str(path), overrides=setters, raw=raw)


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        files = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, files, n=1) or difflib.get_close_matches(
            f"{path.name}.toml", files, n=1
        )
        advice = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: there is no such configuration file{advice}")
    return load_toml(path, error=ConfigError)


def _parse(text: str) -> tuple[dict[str, Any], str]:
    key, equals, right = text.partition("=")
    key, right = key.strip(), right.strip()
    if not equals or not key:
        raise ConfigError(f"override {text!r} is not of the form section.key=value, for example data.batch_size=4096")
    for value in (right, json.dumps(right, ensure_ascii=False).replace("\x7f", "\\u007f")):
        try:
            table = tomllib.loads(f"{key} = {value}")
        except (ValueError, RecursionError):
            continue
        if _is_chain(table, key):
            return table, right
    raise ConfigError(f"override {text!r}: {key!r} is not a dotted TOML key such as section.key")


def _is_chain(table: Mapping[str, Any], key: str) -> bool:
    """Whether the text was one assignment to ``key``: a line break in the value would have made several."""
    path, expected = [], tomllib.loads(f"{key} = 0")
    while isinstance(expected, dict):
        if len(path) == _DEEPEST:
            return False
        if not isinstance(table, Mapping) or len(table) != 1 or list(table) != list(expected):
            return False
        path.append(next(iter(table)))
        table, expected = table[path[-1]], expected[path[-1]]
    return True


def _merge(content: dict[str, Any], table: Mapping[str, Any], text: str, prefix: str = "") -> None:
    for name, value in table.items():
        if not isinstance(value, Mapping):
            content[name] = value
            continue
        inner = content.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"override {text!r}: {prefix}{name} is {inner!r} in the file, not a table with keys of its own"
            )
        _merge(inner, value, text, f"{prefix}{name}.")
