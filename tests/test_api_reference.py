"""docs/api/ is what the docstrings say, and every public name has one."""

import importlib
import inspect

import pytest

import jrec
from scripts import api_reference


def test_the_pages_are_what_the_docstrings_say():
    written = {path.name: path.read_text() for path in api_reference.FOLDER.iterdir()}
    assert written == api_reference.pages(), "run `python -m scripts.api_reference`"
    assert not [name for name, text in written.items() if " at 0x" in text or text.count("```") % 2]


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_every_public_name_has_a_docstring(package):
    module = importlib.import_module(package)
    missing = []
    for name in api_reference.public_names(package):
        of = getattr(module, name)
        missing += [name] if callable(of) and not api_reference.documented(of) else []
        if inspect.isclass(of):
            missing += [f"{name}.{m}" for m, f in api_reference.methods(of) if not api_reference.documented(f)]
    assert not missing


def test_sections_and_examples_become_markdown():
    text = "One.\n\nArgs:\n  x: An ``int``,\n    of any size.\n\nExample:\n  >>> f(1)\n  2"
    wanted = "One.\n\n**Args**\n\n- `x`: An `int`,\n  of any size.\n\n**Example**\n\n\n```pycon\n>>> f(1)\n2\n```"
    assert api_reference.markdown(text) == wanted


def test_a_flax_module_is_shown_with_its_own_arguments():
    shown = "".join(api_reference.signature("MLP", jrec.nn.MLP).split())
    assert shown.startswith("MLP(sizes:Sequence[int],*,activate_last:bool")
    assert api_reference.signature("CacheHits", jrec.nn.CacheHits) == "CacheHits(hits: int, lookups: int)"


@pytest.mark.parametrize("package", api_reference.GROUPS)
def test_every_name_of_a_package_in_groups_is_in_one(package):
    grouped = [name for names in api_reference.groups(package).values() for name in names]
    assert sorted(grouped) == api_reference.public_names(package), "name it in GROUPS of scripts/api_reference.py"


def test_internal_names_exist_and_are_on_no_page():
    pages = api_reference.pages()
    for package, names in api_reference.INTERNAL.items():
        for name in names:
            assert hasattr(importlib.import_module(package), name)
            assert f"# {name}\n" not in pages[f"{package}.md"]
