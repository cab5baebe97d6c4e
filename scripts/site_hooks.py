"""Hooks of mkdocs: what pages have on GitHub, as the site needs it.

Links that leave docs/ lead to what the site has instead: a program of examples/ has a page of its own, other files and
folders are shown by name only. A notebook is shown by the page that names it. Of drawings there is a dark one, too,
and each is shown where the reader's scheme is its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\.svg\)")
NOTEBOOK = re.compile(r"<!-- notebook: (\S+) -->")
COLOR = re.compile(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b", re.IGNORECASE)
DARK = {
    "#fff": "#14171b",
    "#ffffff": "#14171b",
    "#222": "#e7eaee",
    "#1b1f24": "#e7eaee",
    "#000000": "#e7eaee",
    "#444": "#c3cad1",
    "#555": "#a5afba",
    "#59636e": "#a5afba",
    "#808080": "#a5afba",
    "#b0b0b0": "#59636e",
    "#cccccc": "#3a424c",
    "#d4d9df": "#3a424c",
    "#f3f5fa": "#1e2329",
    "#4a5fa5": "#9db0f0",
    "#7b5ea7": "#b49be0",
    "#c2553d": "#ef8e78",
    "#d99a2b": "#f0b04a",
    "#3f7cac": "#6fb3e6",
    "#0072b2": "#56b4e9",
    "#b26b00": "#f0b04a",
    "#1b4965": "#3d7ea6",
}
"""Colours of drawings, and what takes their place on a dark page; other colours are legible on both."""


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the dark drawings."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".svg")]:
        files.append(File.generated(config, _dark_name(file.src_uri), content=darkened(file.content_string)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text with its notebook, links and drawings as the site needs them."""
    path, docs = pathlib.Path(page.file.src_uri), pathlib.Path(config.docs_dir)
    return with_both_schemes(with_links_inside(with_notebook(markdown, path, docs), path, docs))


def with_notebook(text: str, page: pathlib.Path, docs: pathlib.Path) -> str:
    """Puts the cells of a notebook, but the first, which is its title, where the page names it.

    Args:
      text: The page, Markdown.
      page: The page's path in ``docs``.
      docs: The folder of all pages, beside that of the notebook.
    """

    def cells(named: re.Match[str]) -> str:
        notebook = json.loads((docs.parent / named[1]).read_text(encoding="utf-8"))
        parts = [
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
            for cell in notebook["cells"][1:]
            for source in ["".join(cell["source"])]
        ]
        return "\n\n".join(parts).replace("](../docs/", f"]({os.path.relpath('.', page.parent)}/")

    return NOTEBOOK.sub(cells, text)


def with_links_inside(text: str, page: pathlib.Path, docs: pathlib.Path) -> str:
    """Rewrites links that lead out of ``docs`` or to one of its folders.

    Args:
      text: The page, Markdown.
      page: The page's path in ``docs``.
      docs: The folder of all pages.

    Returns:
      The page's text; links between pages are as they were.
    """

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.normpath(page.parent / link[2])
        program = re.fullmatch(r"\.\./examples/(\w+)\.(?:py|ipynb)", target)
        if program:
            return f"[{link[1]}]({os.path.relpath(f'how_to/{program[1]}.md', page.parent)})"
        if target.startswith("..") or (docs / target).is_dir():
            return link[1]
        return link[0]

    return LINK.sub(rewritten, text)


def with_both_schemes(text: str) -> str:
    """Shows each drawing of a page in two: the light one where the page is light, the dark one where it is dark."""

    def both(picture: re.Match[str]) -> str:
        name, path = picture[1], f"{picture[2]}.svg"
        return f"![{name}]({path}#only-light)![{name}]({_dark_name(path)}#only-dark)"

    return PICTURE.sub(both, text)


def darkened(drawing: str) -> str:
    """An SVG file in the colours of a dark page; texts without a colour, black by default, among them."""
    recolored = COLOR.sub(lambda color: DARK.get(color[0].lower(), color[0]), drawing)
    return recolored.replace("<svg ", f'<svg fill="{DARK["#000000"]}" ', 1)


def _dark_name(path: str) -> str:
    return path.removesuffix(".svg") + ".dark.svg"
