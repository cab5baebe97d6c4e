"""Offsets that do not ascend from 0 to at most the number of ids: refused outside jit, NaN inside, everywhere."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_interpreter import race_free

from jrec import ops
from jrec.pallas.tt import bags as tt_bags

IMPLEMENTATIONS = ("xla", "native", "pallas")
CAPACITY = 6
# Offsets of three bags of six ids, and which bags they bound wrongly.
MALFORMED = [
    ([0, 5, 3, 6], [1]),
    ([1, 2, 3, 6], [0]),
    ([0, 2, 3, 7], [2]),
    ([0, -1, 3, 6], [0, 1]),
    ([-3, 1, 3, 6], [0]),
    ([0, 2, 3, 2**30], [2]),
    ([0, 6, 0, 6], [1]),
    ([0, -5, -3, -1], [0, 1, 2]),
    ([0, 9, 9, 9], [0, 1, 2]),
    ([3, 3, 3, 3], [0]),
]
SHAPE = ops.TTShape.search(40, 8, ranks=2)
CORES = ops.tt_init(SHAPE, jax.random.key(0))


def running(implementation):
    return race_free() if implementation == "pallas" else contextlib.nullcontext()


def own_sums(rows, offsets, wrong):
    sums = [np.full(rows.shape[1], np.nan) if b in wrong else rows[offsets[b] : offsets[b + 1]].sum(0)
            for b in range(len(offsets) - 1)]  # fmt: skip
    return np.stack(sums)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_are_nan_or_of_the_own_ids(implementation):
    rng = np.random.default_rng(0)
    table, ids = rng.normal(size=(9, 8)).astype(np.float32), rng.permutation(9)[:CAPACITY].astype(np.int32)
    run = jax.jit(functools.partial(ops.embedding_bag, implementation=implementation))
    for offsets, wrong in MALFORMED:
        with running(implementation):
            got = run(table, ids, np.array(offsets, np.int32))
        np.testing.assert_allclose(got, own_sums(table[ids], offsets, wrong), rtol=1e-5, err_msg=str(offsets))


@pytest.mark.parametrize(("implementation", "length"), [("xla", 100), ("pallas", 100), ("native", 9000)])
def test_long_bags(implementation, length):
    """Longer than a GPU's runs, and than the pieces of the native kernels."""
    source = np.random.default_rng(0).normal(size=(length, 4)).astype(np.float32)
    indices = np.arange(length, dtype=np.int32)
    run = jax.jit(functools.partial(ops.gather_reduce, implementation=implementation))
    for offsets, wrong in [
        ([0, length // 2, length + 5], [1]),
        ([-2, length // 2, length], [0]),
        ([3, 4, length], [0]),
    ]:
        with running(implementation):
            got = run(source, indices, np.array(offsets, np.int32))
        np.testing.assert_allclose(got, own_sums(source, offsets, wrong), rtol=1e-4, atol=1e-4, err_msg=str(offsets))


@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "max"])
def test_other_combiners(combiner):
    rng = np.random.default_rng(1)
    table, ids = rng.normal(size=(9, 8)).astype(np.float32), rng.permutation(9)[:CAPACITY].astype(np.int32)
    run = jax.jit(functools.partial(ops.embedding_bag, combiner=combiner))
    pool = {"mean": lambda r: r.mean(0), "sqrtn": lambda r: r.sum(0) / len(r) ** 0.5, "max": lambda r: r.max(0)}
    for offsets, wrong in MALFORMED:
        got = np.asarray(run(table, ids, np.array(offsets, np.int32)))
        assert set(wrong) <= set(np.flatnonzero(np.isnan(got).any(1))), offsets
        for b in set(range(3)) - set(wrong):
            rows = table[ids[offsets[b] : offsets[b + 1]]]
            want = pool[combiner](rows) if len(rows) else np.zeros(8)
            if not np.isnan(got[b]).all():  # bags that share ids may be NaN, too
                np.testing.assert_allclose(got[b], want, rtol=1e-5, err_msg=str(offsets))


@pytest.mark.parametrize("contraction", ["unique", "sample", "naive"])
def test_tensor_train_bags(contraction):
    ids = jnp.array([3, 17, 4, 39, 0, 21], jnp.int32)
    run = jax.jit(lambda ids, offsets: ops.tt_embedding_bag(CORES, SHAPE, ids, offsets, contraction=contraction))
    rows = np.asarray(ops.tt_embedding_bag(CORES, SHAPE, ids[:, None], contraction="naive"))
    for offsets, wrong in MALFORMED:
        got = np.asarray(run(ids, np.array(offsets, np.int32)))
        want = own_sums(rows, offsets, wrong)
        other = np.isnan(got).all(1)
        assert set(wrong) <= set(np.flatnonzero(other)), offsets
        np.testing.assert_allclose(got[~other], want[~other], rtol=1e-4, atol=1e-6, err_msg=str(offsets))


def test_tensor_train_bags_of_the_gpu_kernel():
    ids = jnp.array([3, 17, 4, 39, 0, 21], jnp.int32)
    rows = np.asarray(ops.tt_embedding_bag(CORES, SHAPE, ids[:, None], contraction="naive"))
    below = jnp.asarray(rows).reshape(len(ids), SHAPE.dim, 1)
    core = jnp.ones((1, 1, 1, 1))
    for offsets, wrong in MALFORMED[:4]:
        with race_free():
            got = tt_bags(
                below, core, jnp.arange(6, dtype=jnp.int32), jnp.zeros(6, jnp.int32), jnp.arange(6, dtype=jnp.int32),
                jnp.array(offsets, jnp.int32), None,
            )  # fmt: skip
        np.testing.assert_allclose(got, own_sums(rows, offsets, wrong), rtol=1e-5, err_msg=str(offsets))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cast_gives_no_row_the_gradient_of_another_bag(implementation):
    ids = np.array([8, 7, 6, 5, 4, 3], np.int32)
    run = jax.jit(functools.partial(ops.tensor_cast, num_rows=9, implementation=implementation))
    for offsets, _ in MALFORMED:
        with running(implementation):
            cast = jax.device_get(run(ids, np.array(offsets, np.int32)))
        count = int(cast.num_unique)
        for u in range(count):
            for j in range(cast.offsets[u], cast.offsets[u + 1]):
                bag, position = cast.sources[j], cast.positions[j]
                assert ids[position] == cast.rows[u]
                assert offsets[bag] <= position < offsets[bag + 1], (offsets, bag, position)
        np.testing.assert_array_equal(cast.rows[count:], 9)
        assert sorted(cast.positions) == list(range(CAPACITY))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_a_step_makes_the_loss_nan_and_keeps_rows_of_malformed_bags(implementation):
    table = jnp.ones((9, 4))

    @jax.jit
    def step(table, ids, offsets):
        bags = {"t": ops.Bags(ids=ids, offsets=offsets)}
        out, residuals = ops.lookup({"t": table}, bags, implementation=implementation)
        new, _ = ops.apply_gradients(
            ops.SGD(learning_rate=0.5), {"t": table}, {"t": {}}, residuals, {"t": jnp.ones((3, 4))},
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(out["t"]), new["t"]

    ids = np.arange(CAPACITY, dtype=np.int32)
    for offsets, _ in MALFORMED:
        loss, new = step(table, ids, np.array(offsets, np.int32))
        assert np.isnan(loss), offsets
        np.testing.assert_array_equal(new, table, err_msg=str(offsets))


def _eager(ids, offsets):
    bags, table = ops.Bags(ids=ids, offsets=offsets), jnp.ones((40, 8))
    return [
        lambda: ops.embedding_bag(table, ids, offsets),
        lambda: ops.gather_reduce(table, ids, offsets),
        lambda: ops.tensor_cast(ids, offsets, num_rows=40),
        lambda: ops.lookup({"t": table}, {"t": bags}),
        lambda: ops.tt_embedding_bag(CORES, SHAPE, ids, offsets),
        lambda: ops.tt_lookup(CORES, SHAPE, bags),
    ]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5, 3, 6], r"offsets\[1:3\] are 5 and 3, but offsets must ascend from 0 to at most .* 6; make them from"),
        ([1, 2, 3, 6], r"offsets\[0\] is 1, but offsets must ascend from 0"),
        ([0, 2, 3, 7], r"offsets\[3\] is 7, but offsets must ascend from 0 to at most the number of \w+, 6"),
        ([0, -1, 3, 6], r"offsets\[0:2\] are 0 and -1"),
    ],
)
def test_outside_jit_every_op_names_the_offsets(offsets, message):
    for run in _eager(jnp.arange(CAPACITY, dtype=jnp.int32), jnp.array(offsets, jnp.int32)):
        with pytest.raises(ValueError, match=message):
            run()
