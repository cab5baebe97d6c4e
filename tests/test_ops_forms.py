"""Ids of every accepted form and type give what int32 bags of NumPy rows give; what does not fit is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrec import ops

ROWS, DIM = 100, 8
SHAPE = ops.TTShape.search(ROWS, DIM, ranks=4)
CORES = ops.tt_init(SHAPE, jax.random.key(0))
TABLE = np.asarray(ops.tt.tt_to_dense(CORES, SHAPE))
DOORS = {
    "whole": lambda *args, **options: ops.embedding_bag(jnp.asarray(TABLE), *args, **options),
    "tt": lambda *args, **options: ops.tt_embedding_bag(CORES, SHAPE, *args, **options),
}
DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def rows_of(ids):
    """(.., dim): a row for each id, zeros for absent ones."""
    ids = np.asarray(ids).astype(np.int64)
    return np.where((ids >= 0)[..., None], TABLE[np.maximum(ids, 0)], 0)


def equal(got, wanted):
    assert got.dtype == jnp.float32
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("door", DOORS)
def test_shapes_and_types(door):
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        low = 0 if dtype.startswith("u") else -1
        one, several = rng.integers(low, ROWS, 6).astype(dtype), rng.integers(low, ROWS, (2, 3, 4)).astype(dtype)
        for array in (np.asarray, jnp.asarray) if np.dtype(dtype).itemsize <= 4 else (np.asarray,):
            equal(DOORS[door](array(one)), rows_of(one))
            equal(DOORS[door](array(several)), rows_of(several).sum(2))
            bounds = array(np.array([0, 4, 4, 6], dtype))
            equal(
                DOORS[door](array(one), bounds), np.stack([rows_of(one[s]).sum(0) for s in np.split(np.r_[:6], [4, 4])])
            )
    equal(DOORS[door](np.zeros((2, 0, 4), np.int8)), np.zeros((2, 0, DIM)))
    equal(DOORS[door](np.zeros(0, np.int64)), np.zeros((0, DIM)))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("door", DOORS)
def test_several_features_are_pooled_and_differentiated_bag_by_bag(door, combiner):
    rng = np.random.default_rng(1)
    ids, weights = rng.integers(-1, ROWS, (2, 3, 4)), rng.normal(size=(2, 3, 4)).astype(np.float32)
    flat = ids.reshape(6, 4).astype(np.int32)

    def loss(weights, ids):
        return jnp.sum(jnp.sin(DOORS[door](ids, weights=weights.reshape(ids.shape), combiner=combiner)))

    wanted = DOORS[door](flat, weights=weights.reshape(6, 4), combiner=combiner)
    np.testing.assert_array_equal(DOORS[door](ids, weights=weights, combiner=combiner), wanted.reshape(2, 3, DIM))
    np.testing.assert_array_equal(jax.grad(loss)(weights, ids), jax.grad(loss)(weights, flat))
    one = ids[0, 0]
    np.testing.assert_array_equal(
        DOORS[door](one, weights=weights[0, 0], combiner=combiner),
        DOORS[door](one[:, None].astype(np.int32), weights=weights[0, 0, :, None], combiner=combiner),
    )


@pytest.mark.parametrize("door", DOORS)
def test_ids_that_do_not_fit_are_never_other_rows(door):
    for ids in (np.array([3, 2**32 + 3]), np.array([3, 2**31], np.uint32), np.array([3, 2**63], np.uint64)):
        with pytest.raises(ValueError, match=rf"ids\[1\] is {ids[1]}, but the table has 100 rows; hash or clip"):
            DOORS[door](ids)
    equal(DOORS[door](np.array([3, -(2**40)])), rows_of([3, -1]))
    wide = jnp.array([3, 2**32 - 2], jnp.uint32)
    with pytest.raises(ValueError, match=r"ids\[1\] is 4294967294, but"):
        DOORS[door](wide)
    inside = jax.jit(DOORS[door])(wide)
    assert np.isnan(inside[1]).all()
    if door == "whole":  # bags of tensor trains may share a NaN
        np.testing.assert_allclose(inside[0], TABLE[3], rtol=1e-5)
    with jax.enable_x64(True):
        inside = jax.jit(DOORS[door])(np.array([2**32 + 3, -(2**40)]))
    assert np.isnan(inside[0]).all()
    with pytest.raises(ValueError, match=r"offsets\[1\] is 2147483647, but offsets must ascend"):
        DOORS[door](np.array([3, 4]), np.array([0, 2**32]))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (np.zeros(3), {}, r"ids must be integers, but are float64; convert them, such as by ids.astype\('int32'\)"),
        (np.zeros(3, bool), {}, "ids must be integers, but are bool"),
        (np.int64(3), {}, r"ids must have shape \(num_bags, length\), but have shape \(\); reshape them"),
        (np.zeros((3, 1), int), {"offsets": np.array([0, 3])}, r"have shape \(3, 1\); flatten them, or leave the off"),
        (np.zeros(3, int), {"offsets": np.array([0.0, 3.0])}, "offsets must be integers, but are float64"),
        (np.zeros(3, int), {"weights": np.ones((3, 1), np.float32)}, r"weights must have the ids' shape \(3,\)"),
        (np.zeros(3, int), {"weights": np.ones(3)}, "weights must be float32"),
        ([0, 1], {"weights": [0.5, 1.5]}, "weights must be float32"),
    ],
)
def test_what_is_no_form_of_ids(door, ids, options, message):
    with pytest.raises(ValueError, match=message):
        DOORS[door](ids, **options)


def test_two_phases_take_one_id_a_bag():
    rng = np.random.default_rng(2)
    ids, weights = rng.integers(-1, ROWS, 9), jnp.asarray(rng.normal(size=9), jnp.float32)
    given, wanted = (
        ops.Bags(ids=ids, weights=weights),
        ops.Bags(ids=ids[:, None].astype(np.int32), weights=weights[:, None]),
    )
    optimizer, tables = ops.Adagrad(learning_rate=0.1), {"t": jnp.asarray(TABLE)}

    def whole(bags):
        activations, residuals = ops.lookup(tables, {"t": bags})
        return activations, ops.apply_gradients(
            optimizer, tables, ops.init_slots(optimizer, tables), residuals, activations
        )

    def train(bags):
        activations, residuals = ops.tt_lookup(CORES, SHAPE, bags)
        return activations, ops.tt_core_gradients(CORES, SHAPE, residuals, activations)

    for phases in (whole, train):
        jax.tree.map(np.testing.assert_array_equal, phases(given), phases(wanted))
    np.testing.assert_allclose(whole(given)[0]["t"], rows_of(ids) * weights[:, None], rtol=1e-6)
    past = ops.lookup(tables, {"t": ops.Bags(ids=np.array([3, 2**32 + 3]))})[0]["t"]
    assert np.isnan(past).any(1).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"indices must have .*; give offsets, or indices\[:, None\] for one id a bag"):
        ops.gather_reduce(tables["t"], jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"have shape \(2, 3, 4\); reshape them, such as by indices.reshape\(-1, len"):
        ops.lookup(tables, {"t": ops.Bags(ids=np.zeros((2, 3, 4), int))})
