"""The Python examples of README and two pages run as they stand, and what they print shows that they learn."""

import contextlib
import io
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    "README.md": "jrec.nn.Embed",
    "docs/functional.md": "jrec.lookup",
    "docs/recipes.md": "jrec.nn.DLRM",
    "docs/sparse_gradients.md": "jrec.Table",
}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_and_learn(page):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert PAGES[page] in examples[0]
    names = {"__name__": "example"}
    for example in examples:
        example = example.replace("100_000_000", "100_000")  # README's table, in less memory and time
        out = io.StringIO()
        # As a reader runs it: without the strictness of the tests.
        with contextlib.redirect_stdout(out), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(example, page, "exec"), names)
        if "loss" in example:
            loss = float(re.fullmatch(r"loss (\d+\.\d+)\n", out.getvalue()).group(1))
            assert loss < 0.6
