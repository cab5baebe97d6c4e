"""Hooks of mkdocs: links that work on GitHub but leave docs/ lead to what the site has instead.

A program of examples/ has a page of its own; other files and folders are shown by name only.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text with its links as the site needs them."""
    return with_links_inside(markdown, pathlib.Path(page.file.src_uri), pathlib.Path(config.docs_dir))


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
        program = re.fullmatch(r"\.\./examples/(\w+)\.py", target)
        if program:
            return f"[{link[1]}]({os.path.relpath(f'how_to/{program[1]}.md', page.parent)})"
        if target.startswith("..") or (docs / target).is_dir():
            return link[1]
        return link[0]

    return LINK.sub(rewritten, text)
