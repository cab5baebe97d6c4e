"""Typed sections of a TOML file: frozen dataclasses whose annotations say what each key may hold.

A section derives from ``Section``. Its annotations may be ``bool``, ``int``, ``float``, ``str``, ``Literal`` of
strings, ``tuple[X, ...]``, ``Mapping[str, X]``, another section, ``X | None``, ``Annotated[X, Range(...)]``, or
``Annotated[str, Choices(...)]``; ``Mapping[str, Any]`` is a free table of JSON's values. With ``Formerly`` a key
accepts older names, too, and a field with ``Open`` holds further sections, which stand beside the other keys. Values
are checked however a section is made, from TOML or in Python.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, Self, Union

from jrec.app.config.synonyms import SYNONYMS
from jrec.bounds import Range as Range
from jrec.errors import ConfigError
from jrec.json_values import JsonObject

MOST = 2**31 - 1
"""The largest integer of a key without a maximum of its own: JAX counts steps, rows and examples in int32."""
Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Amount = Annotated[float, Range(minimum=0)]
Width = Annotated[int, Range(minimum=1, maximum=65536)]
Ahead = Annotated[int, Range(minimum=0, maximum=1024)]  # threads, or batches under way
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
Known = Callable[[], list[str]]  # every valid key, for the advice of an error
_TOML_TYPES = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array", tuple: "array"}


@dataclasses.dataclass(frozen=True)
class Choices:
    """The strings that a key takes, where they are known only at run time; else use ``Literal``.

    Attributes:
      values: A function that returns them.
    """

    values: Callable[[], Collection[str]]


@dataclasses.dataclass(frozen=True)
class Auto:
    """Marks a key that also takes "auto", which is None in code and its default."""


@dataclasses.dataclass(frozen=True)
class Formerly:
    """An older name of one of a key's strings, and today's: files of older runs have it."""

    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Open:
    """Marks a field ``Mapping[str, Section]`` of sections that are known by name and loaded where they are given.

    Attributes:
      names: All their names.
      load: Gives the class of one.
    """

    names: Collection[str]
    load: Callable[[str], type[Section]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origins:
    """Where the values of a configuration came from, for error messages.

    Attributes:
      file: The name of the origin of every key that ``overrides`` lacks.
      overrides: By dotted key, the command-line text that set it.
      raw: By dotted key, the right-hand side of that text as it was typed.
    """

    file: str
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    raw: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __getitem__(self, key: str) -> str:
        setters = [k for k in self.overrides if k == key or k.startswith(f"{key}.")]
        return f"override {self.overrides[setters[0]]!r}" if setters else self.file


class Section:
    """The base of every section. Subclasses are frozen keyword-only dataclasses and may define ``check``."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            key = f"{type(self).__name__}.{name}"
            if (opened := _opened(hint)) is not None:
                object.__setattr__(self, name, _further(getattr(self, name), opened, f"{key}.", Origins(file="value")))
                continue
            value = _convert(getattr(self, name), hint, key, Origins(file="value"), list)
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Rules that concern several keys at once.

        Raises:
          ConfigError: If one is broken; the message names the keys and their values.
        """

    @classmethod
    def from_dict(cls, content: Mapping[str, object], origins: Origins | None = None) -> Self:
        """Builds the section from nested tables as ``tomllib`` returns them.

        Raises:
          ConfigError: On an unknown, missing or ill-typed key, or a value out of range.
        """
        return _build(cls, content, "", origins or Origins(file="configuration"), lambda: list(keys(cls)))

    def to_dict(self) -> JsonObject:
        """Nested plain dictionaries and lists of every key that is set, fit for JSON and ``from_dict``."""
        return _plain(self)

    def to_toml(self) -> str:
        """TOML that ``from_dict`` reads back to an equal section."""
        return "\n".join(_toml_lines(self.to_dict(), "")).strip() + "\n"

    def flatten(self) -> JsonObject:
        """Values by dotted key."""
        return dict(leaves(self.to_dict()))


def hints(cls: type) -> dict[str, Any]:
    """The annotations of a section's fields, ``Annotated`` kept, in order."""
    return _hints(cls)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    annotations = typing.get_type_hints(cls, include_extras=True)
    return {field.name: annotations[field.name] for field in dataclasses.fields(cls)}


def keys(cls: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a section takes; ``NAME`` stands for the free keys of a mapping."""
    for name, hint in hints(cls).items():
        base = _strip(hint)[0]
        if (opened := _opened(hint)) is not None:
            for further in opened.names:
                yield from keys(opened.load(further), f"{prefix}{further}.")
        elif _is_section(base):
            yield from keys(base, f"{prefix}{name}.")
        elif typing.get_origin(base) is collections.abc.Mapping:
            element = typing.get_args(base)[1]
            yield from keys(element, f"{prefix}{name}.NAME.") if _is_section(element) else [f"{prefix}{name}.NAME"]
        else:
            yield f"{prefix}{name}"


def describe(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """For every dotted key: the key, what it may hold, and its default as TOML ("" where there is none)."""
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        hint = hints(cls)[field.name]
        base = _strip(hint)[0]
        if (opened := _opened(hint)) is not None:
            for further in opened.names:
                yield from describe(opened.load(further), f"{prefix}{further}.")
        elif _is_section(base):
            yield from describe(base, f"{prefix}{field.name}.")
        elif typing.get_origin(base) is collections.abc.Mapping:
            element, place = typing.get_args(base)[1], f"{prefix}{field.name}.NAME"
            yield from describe(element, f"{place}.") if _is_section(element) else [(place, type_name(element), "")]
        else:
            known = field.default is not dataclasses.MISSING and field.default is not None
            default = toml_value(field.default) if known else toml_value("auto") if _automatic(hint) else ""
            yield f"{prefix}{field.name}", type_name(hint), default


def open_sections(hint: object) -> dict[str, type[Section]]:
    """The sections that a field with ``Open`` may hold, by name; of other annotations none."""
    opened = _opened(hint)
    return {} if opened is None else {name: opened.load(name) for name in opened.names}


def type_name(hint: object) -> str:
    """The values that a key may hold, in the words of error messages."""
    base, bounds = _strip(hint)
    suffix = f" {bounds}" if bounds is not None else ""
    if typing.get_origin(base) is Literal:
        return "one of " + ", ".join(toml_value(choice) for choice in typing.get_args(base))
    if typing.get_origin(base) is tuple:
        return "an array, each element " + type_name(typing.get_args(base)[0])
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Any: "any value"}
    return names.get(base, "a table") + suffix + (' or "auto"' if _automatic(hint) else "")


def toml_value(value: object) -> str:
    """A scalar, an array, or a table inside of an array, as TOML; paths as texts, NumPy's values as Python's."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if (tolist := getattr(value, "tolist", None)) is not None:  # NumPy's, whose repr, "np.int64(3)", is no TOML
        value = tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):  # inside an array
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _strip(hint: Any) -> tuple[Any, Range | None]:
    """The type under ``Annotated`` and ``| None``, and its range."""
    bounds = None
    while True:
        origin = typing.get_origin(hint)
        if origin is Annotated:
            bounds = next((m for m in hint.__metadata__ if isinstance(m, Range)), bounds)
            choices = next((m for m in hint.__metadata__ if isinstance(m, Choices)), None)
            hint = typing.get_args(hint)[0] if choices is None else Literal[tuple(choices.values())]
        elif origin in (Union, types.UnionType):
            hint = next(a for a in typing.get_args(hint) if a is not type(None))
        else:
            return hint, bounds


def _current_name(value: str, hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        return next((m.new for m in hint.__metadata__ if isinstance(m, Formerly) and m.old == value), value)
    return _current_name(value, typing.get_args(hint)[0]) if _optional(hint) else value


def _optional(hint: object) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType) and type(None) in typing.get_args(hint)


def _automatic(hint: Any) -> bool:
    """Whether the key takes "auto"."""
    if typing.get_origin(hint) is Annotated:
        return any(isinstance(m, Auto) for m in hint.__metadata__)
    return _optional(hint) and _automatic(typing.get_args(hint)[0])


def _opened(hint: Any) -> Open | None:
    if typing.get_origin(hint) is not Annotated:
        return None
    return next((m for m in hint.__metadata__ if isinstance(m, Open)), None)


def _further(
    content: Mapping[str, object], opened: Open, prefix: str, origins: Origins, known: Known = list
) -> dict[str, object]:
    return {
        name: _convert(value, opened.load(name), f"{prefix}{name}", origins, known) for name, value in content.items()
    }


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _build[S: Section](cls: type[S], content: Mapping[str, object], prefix: str, origins: Origins, known: Known) -> S:
    fields = hints(cls)
    further_fields = {name: opened for name, hint in fields.items() if (opened := _opened(hint)) is not None}
    fields = {name: hint for name, hint in fields.items() if name not in further_fields}
    values: JsonObject = {}
    for field_name, opened in further_fields.items():
        further = {name: content[name] for name in content if name not in fields and name in opened.names}
        values[field_name] = _further(further, opened, prefix, origins, known)
        content = {name: value for name, value in content.items() if name not in further}
    for name in content:
        if name not in fields:
            _unknown_key(
                name,
                prefix,
                [*fields, *(n for opened in further_fields.values() for n in opened.names)],
                origins,
                known(),
            )
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in content:
            base = _strip(fields[field.name])[0]
            if _is_section(base):  # recurse, so that the message names the first required key inside
                content = {**content, field.name: {}}
                continue
            key = f"{prefix}{field.name}"
            raise ConfigError(
                f"{origins.file}: {key} is missing; it takes {type_name(fields[field.name])}."
                f" Set it in the file or on the command line as {key}=VALUE"
            )
    values |= {name: _convert(v, fields[name], f"{prefix}{name}", origins, known) for name, v in content.items()}
    try:
        return cls(**values)
    except ConfigError as error:  # from cls.check, which does not know where its values came from
        raise ConfigError(f"{origins.file}: {error}") from None


def _convert(value: object, hint: object, key: str, origins: Origins, known: Known) -> Any:
    base, bounds = _strip(hint)
    if base is Any:
        return _free_value(value, key, origins)
    if (value is None and _optional(hint)) or (value == "auto" and _automatic(hint)):
        return None
    if isinstance(value, str):
        value = _current_name(value, hint)
    if _is_section(base):
        if isinstance(value, base):
            return value
        if isinstance(value, Mapping):
            return _build(base, value, f"{key}.", origins, known)
    elif typing.get_origin(base) is collections.abc.Mapping:
        if isinstance(value, Mapping):
            element = typing.get_args(base)[1]
            return {k: _convert(v, element, f"{key}.{toml_key(k)}", origins, known) for k, v in value.items()}
    elif typing.get_origin(base) is tuple:
        if isinstance(value, list | tuple):
            element = typing.get_args(base)[0]
            return tuple(_convert(v, element, key, origins, known) for v in value)
    else:
        return _convert_scalar(value, base, bounds, key, origins, automatic=_automatic(hint))
    return _ill_typed(value, hint, key, origins)


def _free_value(value: object, key: str, origins: Origins, *, in_array: bool = False) -> Any:
    """A value of a free table: what both TOML and JSON have, in plain dictionaries and lists."""
    if isinstance(value, Mapping):
        if not value and not in_array:
            raise ConfigError(f"{origins[key]}: {key} is an empty table, which a file would not keep; leave it out")
        return {
            str(k): _free_value(v, f"{key}.{toml_key(str(k))}", origins, in_array=in_array) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_free_value(v, key, origins, in_array=True) for v in value]
    if value in ("True", "False", "None") and origins.raw.get(key) == value:
        raise ConfigError(f"{origins[key]}: {key} is {value} of Python; write true or false, or leave the key out")
    if not isinstance(value, bool | int | str) and not (isinstance(value, float) and math.isfinite(value)):
        raise ConfigError(
            f"{origins[key]}: {key} is {value!r}; it takes true or false, finite numbers, strings, arrays and tables"
        )
    return value


def _convert_scalar(value: Any, base: Any, bounds: Range | None, key: str, origins: Origins, *, automatic: bool) -> Any:
    hint = base if bounds is None else Annotated[base, bounds]
    hint = Annotated[hint, Auto()] if automatic else hint
    if base is str or typing.get_origin(base) is Literal:
        # name=2024 is a number in TOML, and for a key of texts the text that was typed.
        value = value if isinstance(value, str) else origins.raw.get(key, value)
        if not isinstance(value, str) or (base is not str and value not in typing.get_args(base)):
            _ill_typed(value, hint, key, origins)
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"{origins[key]}: {key} is not valid Unicode text: {value!r}")
        return value
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # TOML's integers have any number of digits
            value = float(value)
    if type(value) is not base or (base is float and not math.isfinite(value)):
        _ill_typed(value, hint, key, origins)
    if base is int and (bounds is None or bounds.maximum is None):
        bounds = dataclasses.replace(bounds or Range(), maximum=MOST)
    if bounds is not None and value not in bounds:
        raise ConfigError(f"{origins[key]}: {key} is {toml_value(value)}, but must be {bounds}")
    return value


def _ill_typed(value: object, hint: object, key: str, origins: Origins) -> NoReturn:
    shown = "a table" if isinstance(value, Mapping) else f"{value!r}"
    kind = f", a TOML {_TOML_TYPES[type(value)]}" if type(value) in _TOML_TYPES else ""
    choices = typing.get_args(_strip(hint)[0]) if typing.get_origin(_strip(hint)[0]) is Literal else ()
    near = difflib.get_close_matches(str(value), choices, n=1)
    advice = f"; did you mean {toml_value(near[0])}?" if near else ""
    if _is_section(_strip(hint)[0]) and key in SYNONYMS:
        advice = f"; did you mean {SYNONYMS[key]}?"
    raise ConfigError(f"{origins[key]}: {key} must be {type_name(hint)}, but is {shown}{kind}{advice}")


def _unknown_key(name: str, prefix: str, siblings: list[str], origins: Origins, known: list[str]) -> NoReturn:
    key = f"{prefix}{toml_key(name)}"
    section = f"[{prefix.rstrip('.')}]" if prefix else "the top level"
    nearest = nearest_key(name, prefix, siblings, known)
    raise ConfigError(
        f"{origins[key]}: unknown key {key}; the nearest valid key is {nearest}. {section} takes {', '.join(siblings)}"
    )


def nearest_key(name: str, prefix: str, siblings: list[str], known: list[str]) -> str:
    """The valid dotted key that ``prefix + name`` means elsewhere; else the one most like it: of the same section, else
    of that name, else any.
    """
    if meant := SYNONYMS.get(name.lower().replace("-", "_")):
        if (leaf := meant.rpartition(".")[2]) in siblings:
            return f"{prefix}{leaf}"
        if meant in known:
            return meant
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return f"{prefix}{near[0]}"
    if same := [k for k in known if k.rpartition(".")[2] == name]:
        return same[0]

    def likeness(key: str) -> float:
        whole = difflib.SequenceMatcher(None, f"{prefix}{name}", key).ratio()
        leaf = difflib.SequenceMatcher(None, name, key.rpartition(".")[2]).ratio()
        return max(whole, leaf)

    return max([*known, *(f"{prefix}{s}" for s in siblings)], key=likeness)


def _plain(value: object) -> Any:
    if isinstance(value, Section):
        flat: JsonObject = {}
        for name, hint in hints(type(value)).items():
            plain = _plain(getattr(value, name))
            flat |= plain if _opened(hint) is not None else {name: plain}
        return {name: v for name, v in flat.items() if v is not None}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def leaves(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{toml_key(name)}.")
        else:
            yield f"{prefix}{toml_key(name)}", value


def toml_key(name: str) -> str:
    """A key as TOML, quoted where it has to be."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def _toml_lines(content: Mapping[str, object], prefix: str) -> Iterator[str]:
    tables = {name: value for name, value in content.items() if isinstance(value, Mapping)}
    for name, value in content.items():
        if name not in tables:
            yield f"{toml_key(name)} = {toml_value(value)}"
    for name, table in tables.items():
        if not table:
            continue
        path = f"{prefix}{toml_key(name)}"
        if any(not isinstance(value, Mapping) for value in table.values()):
            yield from ("", f"[{path}]")
        yield from _toml_lines(table, f"{path}.")
