"""Writes docs/configuration.md, every key of a configuration, from the sections' docstrings:
``python -m scripts.config_reference``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import pathlib
import re
import typing
from collections.abc import Iterator
from typing import Any

from jrec.app.config import TrainConfig
from jrec.app.config.typed_toml import Section, describe, hints, open_sections
from scripts.api_reference import ENTRY, documented

FILE = pathlib.Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Every key that `jrec train` takes, from a TOML file or as `KEY=VALUE` behind it on the command line, where the last one
wins:

    jrec train configs/quickstart.toml optimizer.learning_rate=0.02 data.batch_size=4096

An unknown key, or a value of another type, is refused with the nearest valid key. `jrec init` writes a file for a
dataset, with the reason of each choice; [training](training.md) has the keys by what one wants to do.
"""


def sections(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section by its name in TOML, ``NAME`` for the free keys of a mapping; the outermost is ""."""
    yield prefix, cls
    for name, hint in hints(cls).items():
        if further := open_sections(hint):
            for own, inner in further.items():
                yield from sections(inner, ".".join(filter(None, [prefix, own])))
            continue
        for inner, free in _inner(hint):
            yield from sections(inner, ".".join(filter(None, [prefix, name, "NAME" if free else ""])))


def _inner(hint: Any) -> Iterator[tuple[type[Section], bool]]:
    """The section that an annotation is of, and whether it is one of a mapping's."""
    if isinstance(hint, type) and issubclass(hint, Section):
        yield hint, False
        return
    free = typing.get_origin(hint) is collections.abc.Mapping
    for inner in typing.get_args(hint):
        for cls, deeper in _inner(inner):
            yield cls, free or deeper


def meanings(cls: type) -> dict[str, str]:
    """What the docstrings of a section and its bases say of each key, as Markdown."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, attributes = documented(base).partition("Attributes:\n")
        names: list[str] = []
        for line in attributes.splitlines():
            if re.match(r"  \S", line) and (entry := ENTRY.fullmatch(line.strip())):
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            elif line.startswith("    "):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            else:
                names = []
    return {name: text.replace("``", "`") for name, text in found.items()}


def introduction(cls: type) -> str:
    """What a section's docstring says before its keys, without the section's name."""
    text = documented(cls).partition("Attributes:\n")[0].replace("``", "`").strip()
    text = re.sub(r"^`\[[^`]*\]`: ", "", text)
    return text[:1].upper() + text[1:]


def page() -> str:
    """The page."""
    parts, by_key = [HEAD], {key: (kind, default) for key, kind, default in describe(TrainConfig)}
    for prefix, cls in sections(TrainConfig):
        of_section, said = [], meanings(cls)
        for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
            key = ".".join(filter(None, [prefix, field.name]))
            key = key if key in by_key else f"{key}.NAME"
            if key in by_key:
                kind, default = by_key[key]
                shown = f"`{default}`" if default else "not set"
                of_section.append(f"### `{key}`\n\n{said.get(field.name, '')}\n\nDefault: {shown}. Takes {kind}.")
        if of_section:
            title = f"## `[{prefix}]`" if prefix else "## Top level"
            parts.append("\n\n".join([title, introduction(cls), *of_section]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(page())
