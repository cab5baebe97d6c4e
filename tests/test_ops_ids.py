"""Ids of other types than int32: JAX wraps them inside jit, ``checked_ids`` does not."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jrec
from jrec import ops
from jrec.ops import ids as module

WRAPPING = 2**32 + 3


def test_jax_wraps_what_checked_ids_refuses():
    """The first half is what the documentation warns of; should JAX refuse one day, the warning can go."""
    table, ids = jnp.arange(10, dtype=jnp.float32)[:, None], np.array([[WRAPPING]])
    assert jax.jit(jrec.embedding_bag)(table, ids).tolist() == [[3.0]]
    with pytest.raises(ValueError, match=rf"ids\[0, 0\] is {WRAPPING}, but the table has 10 rows; hash or clip"):
        jax.jit(jrec.embedding_bag)(table, jrec.checked_ids(ids, 10))


def test_outside_jit_int64_is_checked():
    assert jrec.embedding_bag(jnp.ones((10, 2)), np.array([[1]])).tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match=rf"ids\[0, 0\] is {WRAPPING}, but the table has 10 rows; hash or clip"):
        jrec.embedding_bag(jnp.ones((10, 2)), np.array([[WRAPPING]]))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_of_any_type(kind):
    got = jrec.checked_ids(np.array([[0, 3], [99, 7]], kind), 100)
    assert got.dtype == np.int32
    assert got.tolist() == [[0, 3], [99, 7]]


def test_padding_and_limits():
    assert jrec.checked_ids([-1, -(2**40), 2**31 - 2], 2**31 - 1).tolist() == [-1, -1, 2**31 - 2]
    assert jrec.checked_ids([], 3).dtype == np.int32
    same = np.array([1, -1], np.int32)
    assert jrec.checked_ids(same, 3) is same
    assert jrec.checked_ids(jnp.array([1, 2]), 3).tolist() == [1, 2]


@pytest.mark.parametrize("ids", [[2**63], np.array([2**64 - 1], np.uint64), [2**31], [3]])
def test_past_the_table(ids):
    with pytest.raises(ValueError, match=r"ids\[0\] is \d+, but the table has 3 rows"):
        jrec.checked_ids(ids, 3)


@pytest.mark.parametrize("ids", [[1.0], [True], ["1"], [2**64], [None]])
def test_no_integers(ids):
    with pytest.raises(ValueError, match="ids must be integers"):
        jrec.checked_ids(ids, 3)


@pytest.mark.parametrize("rows", [0, -1, 2**31])
def test_row_counts(rows):
    with pytest.raises(ValueError, match=f"num_rows is {rows}"):
        jrec.checked_ids([0], rows)


def test_docstring_example():
    found = doctest.DocTestFinder().find(module.checked_ids, "checked_ids", globs={"jrec": jrec})
    assert sum(len(test.examples) for test in found) == 3
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(("combiner", "offsets"), [("sum", None), ("mean", (0, 2, 2, 6))])
def test_padding_is_no_mistake_to_index_checks_but_an_id_past_the_table_is(combiner, offsets):
    table = jnp.arange(40, dtype=jnp.float32).reshape(10, 4)
    ids = jnp.array([1, -1, 3, -1, 0, -1], jnp.int32)
    ids, offsets = (ids.reshape(3, 2), None) if offsets is None else (ids, jnp.array(offsets, jnp.int32))

    def loss(table, ids):
        return ops.embedding_bag(table, ids, offsets, combiner=combiner, implementation="xla").sum()

    checked = checkify.checkify(jax.jit(jax.value_and_grad(loss)), errors=checkify.index_checks)
    error, (value, gradient) = checked(table, ids)
    error.throw()
    expected, expected_gradient = jax.value_and_grad(loss)(table, ids)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)
    with pytest.raises(Exception, match="index 10 is out of bounds"):
        checked(table, jnp.where(ids == 3, 10, ids))[0].throw()
