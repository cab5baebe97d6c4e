"""The README's Python examples run as they stand, and what they print shows that they learn."""

import contextlib
import io
import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_a_functional_and_an_nnx_example():
    assert len(EXAMPLES) == 2
    assert "jrec.lookup" in EXAMPLES[0]
    assert "jrec.nn.DLRM" in EXAMPLES[1]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs_and_learns(number):
    out = io.StringIO()
    # As a reader runs it: without the strictness of the tests.
    with contextlib.redirect_stdout(out), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(EXAMPLES[number], f"README example {number + 1}", "exec"), {"__name__": "example"})
    loss = float(re.fullmatch(r"loss (\d+\.\d+)\n", out.getvalue()).group(1))
    assert loss < 0.6
