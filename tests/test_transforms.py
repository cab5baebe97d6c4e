"""Every op works under every transformation of JAX and in Flax's modules, or says why not; so does the page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import some_of
from transform_cases import CELLS, PAGE, REASONS, expected, found, page_with

# XLA's code of the other ops is compiled in a second each; the ops of which they are made are here.
QUICK = ("embedding_bag", "tensor_cast", "row_update")


@pytest.mark.parametrize(
    ("op", "transform", "implementation"),
    some_of(CELLS, *(cell for cell in CELLS if cell[2] == "native" or cell[0] in QUICK)),
)
def test_an_op_works_or_says_why_not(op, transform, implementation):
    reason = REASONS.get((op, transform, implementation))
    if reason is not None:
        with pytest.raises(reason.error, match=reason.match):
            found(op, transform, implementation)
        return
    got, want = found(op, transform, implementation), expected(op, transform)
    assert len(jax.tree.leaves(got)) == len(jax.tree.leaves(want)) > 0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(one.dtype, jnp.number):  # changes of integers are of a type without values
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_page_has_the_table():
    """``python tests/transform_cases.py`` writes it."""
    text = PAGE.read_text()
    assert page_with(text) == text
