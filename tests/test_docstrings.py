"""Every example in a docstring of jrec runs, and prints what it says."""

import doctest
import importlib
import io
import pathlib
import re

import docstring_names
import jax
import pytest

import jrec

ROOT = pathlib.Path(jrec.__file__).parent


def examples():
    """Every docstring with an example, by the name of its object."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    for path in sorted(ROOT.rglob("*.py")):
        if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE):
            module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
            found |= {test.name: test for test in finder.find(module) if test.examples}
    return found


EXAMPLES = examples()


def test_all_examples_are_found():
    lines = sum(len(re.findall(r"^\s*>>> ", path.read_text(), re.MULTILINE)) for path in ROOT.rglob("*.py"))
    assert sum(len(test.examples) for test in EXAMPLES.values()) == lines


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path, monkeypatch):
    test = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    source = "".join(example.source for example in test.examples)
    test.globs = test.globs | docstring_names.MODULES | docstring_names.ready(set(re.findall(r"\w+", source)))
    if '"data"' in source:
        test.globs["layout"] = docstring_names.prepare_data(tmp_path)
    out, runner = io.StringIO(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    # As a reader runs it: without the strictness of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runner.run(test, out=out.write, clear_globs=False)
    assert not runner.failures, out.getvalue()
