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

import jrec

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
GROUPS = {
    "jrec": {
        "Start here": "fit FittedModel load_run",
        "Runs": "distribute Run Batch HostOptions MeshOptions",
        "Layouts": "EmbeddingLayout TableConfig FeatureConfig TTShape",
        "Ops": """Table RowGradients Bags Cast checked_ids lookup apply_gradients init_slots embedding_bag
            tt_embedding_bag gather_reduce tensor_cast keep_freed_memory""",
    },
    "jrec.nn": {
        "In place of nnx.Embed": "Embed EmbeddingBag Optimizer uniform_rows TTEmbed TTEmbeddingBag",
        "A model with a layout": """EmbeddingCollection SparseOptimizer train_step accumulated_step TTOptions
            CacheHits""",
        "Click models": """DLRM DLRMConfig TBSM TBSMConfig DIN TargetAttention MultiTaskHeads MultiTaskConfig MLP
            CrossNetwork dot_interaction fm_interaction concat_interaction Calibration""",
        "Sequences and retrieval": """NextItem next_item_layout SequenceEncoder SequenceConfig TwoTower TwoTowerConfig
            UserTower top_k ranks ranking_metrics""",
        "Memories of n-grams": """NGramMemory NGramConfig NGramHashing ngram_rows compressed_vocabulary
            compress_tokens""",
        "Losses": """binary_cross_entropy weighted_binary_cross_entropy focal multi_task_loss squared_error huber
            poisson in_batch_softmax sampled_softmax full_softmax bpr next_item_loss two_tower_loss all_examples
            smoothed_labels masked_mean mean_of_positions of_numbers""",
    },
    "jrec.ops": {
        "Lookups": "lookup Bags Residuals checked_ids embedding_bag gather_reduce current_rows",
        "Updates": """apply_gradients init_slots tensor_cast Cast row_update casted_update squared_gradient_norm
            rows_left_out""",
        "Row optimizers": """RowOptimizer SGD Momentum Adagrad RMSProp Adam RowWiseAdagrad RowWiseRMSProp RowWiseAdam
            ExactMomentum ExactRMSProp ExactAdam ExactAdamW""",
        "Tables with row gradients": "Table RowGradients TableSpec",
        "Tensor trains": """TTShape tt_init tt_init_slots tt_lookup tt_apply_gradients tt_embedding_bag
            tt_core_gradients tt_svd TTCacheConfig TTCache tt_cache_init tt_cache_step tt_cached_lookup
            tt_cached_apply_gradients""",
    },
}
"""By package its public names under titles, in the order of their page; packages of few names have none."""
INTERNAL = {
    "jrec.checkpoint": ("ChangingRows", "CopiedRows"),
    "jrec.nn": ("TTCore", "Table"),
    "jrec.ops": ("row_step",),
}
"""Names that jrec's own packages take from each other, and no program needs; they are on no page."""
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example):")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \w+)*): (.*)")


def public_names(package: str) -> list[str]:
    """The names that a package imports under their own names, without modules; of a module those that it defines.

    Those of ``INTERNAL`` are left out.
    """
    module = importlib.import_module(package)
    names = re.findall(r"^\s*from [\w.]+ import (\w+) as \1$", pathlib.Path(str(module.__file__)).read_text(), re.M)
    if not hasattr(module, "__path__"):
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
    public = {name for name in names if name[0] != "_" and not inspect.ismodule(getattr(module, name))}
    return sorted(public.difference(INTERNAL.get(package, ())))


def groups(package: str) -> dict[str, list[str]]:
    """The names of a page by title; all under "" where the package is in no groups."""
    by_title = {title: names.split() for title, names in GROUPS.get(package, {}).items()}
    return by_title or {"": public_names(package)}


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
    """All pages by file name: one for each package, and an index of jrec's names and of all packages."""
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
    for title, names in groups("jrec").items():
        entries = (f"- [jrec.{name}](jrec.md#{name.lower()}): {says(getattr(jrec, name))}" for name in names)
        lines += [f"## {title}", "", *entries, ""]
    lines += ["## Packages", ""]
    for package in PACKAGES:
        titles = " · ".join(f"[{title}]({package}.md#{anchor(title)})" for title in groups(package) if title)
        said = says(importlib.import_module(package))
        lines.append(f"- [{package}]({package}.md): {said} {titles}".rstrip())
    return {"index.md": "\n".join(lines) + "\n", **written}


def says(public: Any) -> str:
    """The first line of a docstring."""
    return markdown((inspect.getdoc(public) or "").partition("\n")[0])


def anchor(title: str) -> str:
    """The anchor of a heading, as on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def package_page(package: str, homes: dict[int, tuple[str, str]]) -> str:
    """The page of one package; ``homes`` learns which names it documents."""
    module = importlib.import_module(package)
    parts = [f"# {package}", markdown(inspect.getdoc(module) or "")]
    for title, names in groups(package).items():
        level = "###" if title else "##"
        parts += [f"## {title}"] if title else []
        for name in names:
            public = getattr(module, name)
            home, first = homes.setdefault(id(public), (package, name))
            if home != package:
                parts.append(f"{level} {name}\n\nSee [{home}.{first}]({home}.md#{first.lower()}).")
            else:
                parts += described(name, public, level)
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def described(name: str, public: Any, level: str) -> Iterator[str]:
    """What a page says about one public name, under a heading of ``level``, and one level below about its methods."""
    if not callable(public):
        keys = f": {', '.join(map(repr, public))}" if isinstance(public, dict) else ""
        yield f"{level} {name}\n\nA `{type(public).__name__}`{keys}."
        return
    yield f"{level} {name}\n\n```python\n{signature(name, public)}\n```\n\n{markdown(documented(public))}"
    for method, function in methods(public) if inspect.isclass(public) else ():
        property_of = not inspect.isroutine(inspect.getattr_static(public, method))
        head = method if property_of else signature(method, function)
        yield f"{level}# {name}.{method}\n\n```python\n{head}\n```\n\n{markdown(documented(function))}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        path.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
