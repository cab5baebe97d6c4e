"""Writes docs/api/, a page a package, from the docstrings of jrec's public names: ``python -m scripts.api_reference``.

Public is what a package's ``__init__`` imports under its own name, of a module all that it defines without an
underscore, and of classes every such method.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "api"
PACKAGES = (
    "jrec",
    "jrec.nn",
    "jrec.ops",
    "jrec.optax",
    "jrec.data",
    "jrec.sharding",
    "jrec.access",
    "jrec.host",
    "jrec.checkpoint",
    "jrec.serving",
    "jrec.table_files",
    "jrec.app.ray",
)
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example):")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \w+)*): (.*)")


def public_names(package: str) -> list[str]:
    """The names that a package imports under their own names, without modules; of a module those that it defines."""
    module = importlib.import_module(package)
    names = re.findall(r"^\s*from [\w.]+ import (\w+) as \1$", pathlib.Path(str(module.__file__)).read_text(), re.M)
    if not hasattr(module, "__path__"):
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
    return sorted({name for name in names if name[0] != "_" and not inspect.ismodule(getattr(module, name))})


def methods(of: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines, as functions."""
    for name, member in vars(of).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or inspect.unwrap(member)
        function = getattr(function, "__func__", function)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def documented(of: Any) -> str:
    """The docstring, "" where there is none, or only the one that Python gives dataclasses and instances."""
    own = inspect.getdoc(of) or ""
    made = inspect.isclass(of) and own.startswith(f"{of.__name__}(")
    instance = not inspect.isclass(of) and own == inspect.getdoc(type(of))
    return "" if made or instance else own


def markdown(text: str) -> str:
    """A Google-style docstring as Markdown: sections as lists, examples as code."""
    lines, section, code = [], "", False
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith(">>> ") and not code:
            lines += ["", "```pycon"]
            code, indent = True, len(line) - len(line.lstrip())
        elif code and not bare:
            lines.append("```")
            code = False
        if code:
            lines.append(line[indent:])
        elif head := SECTION.fullmatch(line):
            section = head[1]
            lines += [f"**{section}**", ""]
        else:
            section = section if line.startswith(" ") or not bare else ""
            entry = ENTRY.fullmatch(bare) if section and re.match(r"  \S", line) else None
            bare = f"- `{entry[1]}`: {entry[2]}" if entry and section != "Returns" else bare
            continued = bool(section) and line.startswith("    ")
            lines.append(("  " if continued else "") + bare.replace("``", "`"))
    return "\n".join([*lines, "```"] if code else lines)


class Bare(str):
    """An annotation that is shown without quotes."""

    __repr__ = str.__str__


def bare(annotation: Any) -> Any:
    """Annotations of modules that postpone them are texts; named tuples wrap theirs in ``ForwardRef``."""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return Bare(annotation) if isinstance(annotation, str) else annotation


def signature_of(public: Any) -> inspect.Signature:
    """The signature; for a Flax module, whose metaclass takes anything, what ``__init__`` takes."""
    shown = inspect.signature(public)
    if not inspect.isclass(public) or type(public).__call__ is type.__call__:
        return shown
    _, *parameters = inspect.signature(public.__init__).parameters.values()
    return shown.replace(parameters=parameters, return_annotation=shown.empty)


def shown_argument(text: str) -> str:
    """An argument without addresses: a default function by its name, another object as "..."."""
    text = re.sub(r"<function (?:\w+\.)*(\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"<[^<>]* at 0x\w+>", "...", text)


def signature(name: str, of: Any) -> str:
    """NAME(ARGUMENTS) -> RESULT, one argument a line where it is long."""
    try:
        found = signature_of(of)
    except (TypeError, ValueError):
        return name
    found = found.replace(
        parameters=[one.replace(annotation=bare(one.annotation)) for one in found.parameters.values()],
        return_annotation=bare(found.return_annotation),
    )
    line = name + shown_argument(str(found))
    if len(line) <= 100:
        return line
    result = (
        "" if found.return_annotation is found.empty else f" -> {inspect.formatannotation(found.return_annotation)}"
    )
    shown, starred = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        shown.append(shown_argument(str(parameter)))
    return name + "(\n" + "".join(f"    {one},\n" for one in shown) + ")" + result


def pages() -> dict[str, str]:
    """All pages by file name: one for each package, and an index with the first line of what each package says."""
    homes: dict[
        int, tuple[str, str]
    ] = {}  # by id of a public object: the package that documents it, and its name there
    written = {f"{package}.md": package_page(package, homes) for package in PACKAGES}
    lines = [
        "# API reference",
        "",
        "Written by `python -m scripts.api_reference` from the docstrings; do not edit.",
        "",
    ]
    lines += [f"- [{package}]({package}.md): {summary(package)}" for package in PACKAGES]
    return {"index.md": "\n".join(lines) + "\n", **written}


def summary(package: str) -> str:
    """The first line of a package's docstring."""
    return markdown((inspect.getdoc(importlib.import_module(package)) or "").partition("\n")[0])


def package_page(package: str, homes: dict[int, tuple[str, str]]) -> str:
    """The page of one package; ``homes`` learns which names it documents."""
    module = importlib.import_module(package)
    parts = [f"# {package}", markdown(inspect.getdoc(module) or "")]
    for name in public_names(package):
        public = getattr(module, name)
        home, first = homes.setdefault(id(public), (package, name))
        if home != package:
            parts.append(f"## {name}\n\nSee [{home}.{first}]({home}.md#{first.lower()}).")
        else:
            parts += described(name, public)
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def described(name: str, public: Any) -> Iterator[str]:
    """What a page says about one public name, and about its methods."""
    if not callable(public):
        keys = f": {', '.join(map(repr, public))}" if isinstance(public, dict) else ""
        yield f"## {name}\n\nA `{type(public).__name__}`{keys}."
        return
    yield f"## {name}\n\n```python\n{signature(name, public)}\n```\n\n{markdown(documented(public))}"
    for method, function in methods(public) if inspect.isclass(public) else ():
        property_of = not inspect.isroutine(inspect.getattr_static(public, method))
        head = method if property_of else signature(method, function)
        yield f"### {name}.{method}\n\n```python\n{head}\n```\n\n{markdown(documented(function))}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        path.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
