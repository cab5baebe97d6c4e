"""Reading a configuration: a TOML file, or one that comes with jrec, and ``section.key=value`` over it; writing one."""

from __future__ import annotations

import difflib
import json
import os
import pathlib
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping

from jrec.app.config.train import TrainConfig
from jrec.app.config.typed_toml import Origins, describe, leaves
from jrec.data.schema import LOG_ENDINGS, SCHEMA_FILE
from jrec.errors import ConfigError
from jrec.files import load_toml
from jrec.json_values import JsonMapping, JsonObject
from jrec.outputs import write_file

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # of an installed jrec, and of a clone
_DEEPEST = 16  # keys of an override; no key of a configuration is nested as deeply


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> TrainConfig:
    """Reads a run's configuration.

    Args:
      path: A TOML file, or the name of one that comes with jrec (``shipped_configs``).
      overrides: ``section.key=value`` texts that win over the file; see ``read_tables``.
        ``model=package.module:function`` is short for ``model.factory=...``.

    Returns:
      The configuration with every default filled in.

    Raises:
      ConfigError: If the file cannot be read, or a key is unknown, ill-typed, missing or out of range. The message
        names the file or the override, the key, its valid values, and for unknown keys the nearest valid one.
    """
    path = find_config(path)
    content, origins = read_tables(path, map(_with_factory, overrides))
    if isinstance(content.get("schedule"), Mapping):
        raise ConfigError(f"{origins['schedule']}: the section [schedule] is called [lr_schedule]; rename it")
    if "name" not in content:
        content["name"] = re.sub(r"[^\w.+-]|^[.+-]+", "_", pathlib.Path(path).stem)
    return TrainConfig.from_dict(content, origins)


def save_config(config: TrainConfig, path: str | os.PathLike[str]) -> None:
    """Writes the resolved configuration as TOML, atomically; ``load_config`` reads an equal one back."""
    write_file(path, config.to_toml())


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[object, object]]:
    """The dotted keys whose values differ, with both values; None stands for a key that is not set."""
    before, after = old.flatten(), new.flatten()
    everything = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in everything if before.get(key) != after.get(key)}


def key_help() -> str:
    """Every key with its default and valid values, one per line, for ``jrec train --help``."""
    rows = list(describe(TrainConfig))
    width = max(len(f"{key} = {default}") for key, _, default in rows)
    return "\n".join(f"  {f'{key} = {default}' if default else key:<{width}}  {kind}" for key, kind, default in rows)


def shipped_configs() -> dict[str, pathlib.Path]:
    """The configurations that come with jrec, by name, such as "criteo-kaggle"."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    files = [] if folder is None else sorted(folder.glob("*.toml"))
    return {file.stem.replace("_", "-"): file for file in files}


def find_config(path: str | os.PathLike[str]) -> pathlib.Path:
    """A configuration file, or the one that comes with jrec by this name.

    Args:
      path: A file; or, where there is no such file, a name without folder and suffix, with "-" or "_".

    Raises:
      ConfigError: If it is neither and looks like a name; the message has the nearest name.
    """
    file = pathlib.Path(path)
    if file.exists() or file.suffix or len(file.parts) != 1:
        return file
    shipped = shipped_configs()
    if (known := shipped.get(file.name.replace("_", "-"))) is not None:
        return known
    near = difflib.get_close_matches(file.name.replace("_", "-"), shipped, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"{path}: there is no such configuration file, and none of this name comes with jrec; {advice}jrec has"
        f" {', '.join(shipped) or 'none'}"
    )


def _with_factory(override: str) -> str:
    key, equals, value = override.partition("=")
    return (
        f"model.factory={value}"
        if equals and key.strip() == "model" and ":" in value and "{" not in value
        else override
    )


def read_tables(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> tuple[JsonObject, Origins]:
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


def _read(path: pathlib.Path) -> JsonObject:
    if not path.exists():
        files = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, files, n=1) or difflib.get_close_matches(
            f"{path.name}.toml", files, n=1
        )
        advice = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: there is no such configuration file{advice}")
    if advice := _advice(path):
        raise ConfigError(f"{path} is no configuration, but {advice}")
    return load_toml(path, error=ConfigError)


def _advice(path: pathlib.Path) -> str:
    """What a path is that is no configuration, and the command that was meant; "" if it may be one."""
    named, config = shlex.quote(str(path)), shlex.quote(f"{path.name.partition('.')[0] or 'model'}.toml")
    if (path / SCHEMA_FILE).is_file():
        return (
            f"a dataset: `jrec init {named} --out {config}` writes one for it, which `jrec train {config}` trains, and"
            f" `jrec train CONFIG data.path={named}` trains another on it"
        )
    if (path / "config.toml").is_file():
        return f"a run: `jrec train {shlex.quote(str(path / 'config.toml'))} --resume` goes on with it"
    if path.is_dir():
        return "a folder that is neither a dataset nor a run; name a TOML file, such as one of `jrec init`"
    if path.name.lower().endswith(LOG_ENDINGS):
        return (
            f"a log: `jrec prepare csv --input {named} --out DATASET` makes a dataset of it, and `jrec init` writes one"
        )
    return ""


def _parse(text: str) -> tuple[JsonObject, str]:
    key, equals, right = text.partition("=")
    key, right = key.strip(), right.strip()
    if not equals or not key:
        raise ConfigError(f"override {text!r} is not of the form section.key=value, for example data.batch_size=4096")
    # As TOML, or else as a bare string: out=runs/a needs no quotes within a shell's.
    for value in (right, json.dumps(right, ensure_ascii=False).replace("\x7f", "\\u007f")):
        try:
            table = tomllib.loads(f"{key} = {value}")
        except (ValueError, RecursionError):
            continue
        if _is_chain(table, key):
            return table, right
    raise ConfigError(f"override {text!r}: {key!r} is not a dotted TOML key such as section.key")


def _is_chain(table: JsonMapping, key: str) -> bool:
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


def _merge(content: JsonObject, table: Mapping[str, object], text: str, prefix: str = "") -> None:
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
