"""The native kernels on host arrays: threads, skew, in-place updates, and what bad input gets."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec import ops
from jrec.native import host, threads

OPTIMIZERS = (
    ops.SGD(learning_rate=0.1, weight_decay=0.1),
    ops.Momentum(learning_rate=0.1, nesterov=True, max_row_norm=1.0),
    ops.Adagrad(learning_rate=0.1),
    ops.RowWiseAdagrad(learning_rate=0.1),
    ops.RMSProp(learning_rate=0.1),
    ops.Adam(learning_rate=lambda step: 0.1 / (step + 1)),
)


def _same(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def _skewed(rng, *, rows=500, bags=30_000, dim=24):
    """Lookups of which a third fall on one row, and one more on another third of the rest."""
    ids = rng.integers(0, rows, (bags, 1)).astype(np.int32)
    ids[rng.random((bags, 1)) < 0.35] = 7
    ids[rng.random((bags, 1)) < 0.2] = 8
    return ids, rng.normal(size=(rows, dim)).astype(np.float32), rng.normal(size=(bags, dim)).astype(np.float32)


@given(case=reference.cases(past=True), num_threads=st.sampled_from([1, 2, 3]))
@settings(max_examples=150)
def test_gather_reduce_equals_reference(case, num_threads):
    got = host.gather_reduce(case.table, case.ids, case.offsets, weights=case.weights, threads=num_threads)
    np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dim", [1, 16, 31, 64, 130, 256])
def test_bags_of_one_id_get_the_bits_of_their_row(dtype, dim):
    rng = np.random.default_rng(dim)
    table = rng.normal(size=(300, dim)).astype(dtype)
    table[rng.random(table.shape) < 0.1] = -0.0
    ids = rng.integers(-20, 320, (9_000, 1)).astype(np.int32)
    want = np.zeros((9_000, dim), np.float32)
    inside = (ids[:, 0] >= 0) & (ids[:, 0] < 300)
    want[inside] = table[ids[inside, 0]].astype(np.float32) + np.float32(0)  # a sum: +0 of -0
    want[ids[:, 0] >= 300] = np.nan
    for num_threads in (1, 2):
        _same(host.gather_reduce(table, ids, threads=num_threads), want)
    weighted = host.gather_reduce(table, ids, weights=np.ones(ids.shape, np.float32))
    np.testing.assert_array_equal(weighted, want)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_updates_equal_those_inside_jit(optimizer):
    @given(case=reference.cases(reference.SHAPES[1:12:2], past=True))
    @settings(max_examples=15)
    def check(case):
        rows = case.shape.rows
        cast = host.tensor_cast(case.ids, case.offsets, num_rows=rows)
        table, slots = case.table.copy(), {n: np.array(s) for n, s in optimizer.init(jnp.asarray(case.table)).items()}
        want = jnp.asarray(case.table)
        want_slots = optimizer.init(want)
        for step in range(2):
            host.casted_update(
                optimizer, table, slots, cast, case.bag_gradients,
                weights=case.weights, step=step, gradient_scale=0.5, threads=2,
            )  # fmt: skip
            want, want_slots = ops.casted_update(
                optimizer, want, want_slots, cast, jnp.asarray(case.bag_gradients),
                weights=case.weights, step=step, gradient_scale=0.5, implementation="native",
            )  # fmt: skip
        eps = reference.EPSILON[case.shape.dtype] if case.shape.dtype != "float32" else 0
        np.testing.assert_allclose(table.astype(np.float32), np.asarray(want, np.float32), rtol=1e-5 + eps, atol=1e-6)
        for name in slots:
            np.testing.assert_allclose(slots[name], want_slots[name], rtol=1e-5 + 10 * eps, atol=1e-6)

    check()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_skewed_updates_do_not_depend_on_threads(optimizer, weighted):
    rng = np.random.default_rng(0)
    ids, table, gradients = _skewed(rng)
    weights = rng.normal(size=ids.shape).astype(np.float32) if weighted else None
    cast = host.tensor_cast(ids, num_rows=500)
    assert np.diff(cast.offsets).max() > 2 * 4096
    results = []
    for num_threads in (1, 2, 2, 5):
        new, slots = table.copy(), {n: np.array(s) for n, s in optimizer.init(jnp.asarray(table)).items()}
        host.casted_update(optimizer, new, slots, cast, gradients, weights=weights, threads=num_threads)
        results.append((new, slots))
    for new, slots in results[1:]:
        _same(new, results[0][0])
        for name, slot in slots.items():
            _same(slot, results[0][1][name])
    factors = np.ones(len(ids)) if weights is None else weights[:, 0].astype(np.float64)
    sums = np.zeros(table.shape)
    np.add.at(sums, ids[:, 0], factors[:, None] * gradients)
    separate, slots = table.copy(), {n: np.array(s) for n, s in optimizer.init(jnp.asarray(table)).items()}
    host.row_update(optimizer, separate, slots, np.arange(500, dtype=np.int32), sums.astype(np.float32))
    np.testing.assert_allclose(results[0][0], separate, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_skewed_sums_do_not_depend_on_threads(dtype):
    rng = np.random.default_rng(1)
    source = rng.normal(size=(999, 72)).astype(dtype)
    indices = rng.integers(0, 999, 60_000).astype(np.int32)
    bounds = np.sort(rng.integers(0, 60_000, 40))
    offsets = np.concatenate([[0], bounds[:3], bounds[20:], [60_000]]).astype(np.int32)
    results = [host.gather_reduce(source, indices, offsets, threads=n) for n in (1, 2, 2, 5)]
    for other in results[1:]:
        _same(other, results[0])
    sums = np.add.reduceat(np.concatenate([source[indices].astype(np.float64), np.zeros((1, 72))]), offsets[:-1])
    np.testing.assert_allclose(results[0][np.diff(offsets) > 0], sums[np.diff(offsets) > 0], rtol=1e-3, atol=5e-3)


def test_results_can_be_written_to_a_given_array():
    source, indices = np.ones((3, 2), np.float32), np.array([[0, 1], [2, -1]], np.int32)
    out = np.full((2, 2), np.nan, np.float32)
    assert host.gather_reduce(source, indices, out=out) is out
    np.testing.assert_array_equal(out, [[2, 2], [1, 1]])
    with pytest.raises(ValueError, match="out must be float32 of shape"):
        host.gather_reduce(source, indices, out=out[:1])
    with pytest.raises(ValueError, match="out is written in place"):
        host.gather_reduce(source, indices, out=np.zeros((2, 2), np.float32).T)


@st.composite
def _tables(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = np.array(draw(st.lists(st.sampled_from([1, 2, 9, 300, 70_000]), min_size=1, max_size=5)))
    bags = np.array([draw(st.integers(0, 12)) for _ in rows])
    segments = np.concatenate([[[0, 0]], np.stack([np.cumsum(bags), np.cumsum(rows)], 1)])
    lengths = rng.integers(0, 6, bags.sum())
    base = np.repeat(np.repeat(segments[:-1, 1], bags), lengths)
    size = np.repeat(np.repeat(rows, bags), lengths)
    ids = base + rng.integers(0, size) if len(base) else base
    ids[rng.random(ids.size) < 0.1] = -1
    ids[rng.random(ids.size) < 0.1] = segments[-1, 1] + 3
    tail = rng.integers(-1, segments[-1, 1], draw(st.integers(0, 5)))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return np.concatenate([ids, tail]).astype(np.int32), offsets, segments


@given(tables=_tables(), num_threads=st.sampled_from([1, 2]))
@settings(max_examples=100)
def test_casts_by_table_are_identical(tables, num_threads):
    ids, offsets, segments = tables
    num_rows = int(segments[-1, 1])
    whole = host.tensor_cast(ids, offsets, num_rows=num_rows, threads=1)
    split = host.tensor_cast(ids, offsets, num_rows=num_rows, segments=segments, threads=num_threads)
    want = reference.tensor_cast(ids, offsets, num_rows, min(ids.size, num_rows))
    for name, field in want.items():
        np.testing.assert_array_equal(getattr(whole, name), field, err_msg=name)
        np.testing.assert_array_equal(getattr(split, name), field, err_msg=name)


def test_an_id_of_another_table_is_an_error():
    ids = np.array([[0, 1], [2, 1], [3, 2]], np.int32)
    segments = np.array([[0, 0], [1, 2], [3, 4]])
    with pytest.raises(ValueError, match=r"ids\[1, 1\] is 1, a row of another table"):
        host.tensor_cast(ids, num_rows=4, segments=segments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros((2, 3))}, "ids must be int32"),
        ({"ids": np.zeros(6, np.int32)}, r"shape \(num_bags, length\)"),
        ({"num_rows": 0}, "num_rows is 0"),
        ({"num_rows": 2**31}, "num_rows is 2147483648"),
        ({"threads": 0}, "threads=0"),
        ({"segments": np.array([[0, 0], [1, 5]])}, r"ascending from \(0, 0\) to \(2, 5\)"),
        ({"segments": np.array([[0, 0], [3, 2], [2, 5]])}, "ascending"),
        ({"ids": np.zeros(6, np.int32), "offsets": np.array([0, 3, 2, 6], np.int32)}, "descend in between"),
        ({"ids": np.zeros(6, np.int32), "offsets": np.array([0, 7], np.int32)}, "at most 6"),
        ({"ids": np.zeros(6, np.int32), "offsets": np.array([1, 6], np.int32)}, "ascend from 0"),
        ({"ids": np.zeros(6, np.int32), "offsets": np.array([0, 6])}, "offsets must be"),
    ],
)
def test_bad_casts(change, message):
    arguments = {"ids": np.zeros((2, 3), np.int32), "num_rows": 5} | change
    with pytest.raises(ValueError, match=message):
        host.tensor_cast(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": np.zeros((4, 2))}, "table must be a C-contiguous"),
        ({"table": np.zeros((2, 4), np.float32).T}, "table must be a C-contiguous"),
        ({"slots": {}}, "keeps slots"),
        ({"slots": {"sum": np.zeros((4, 2), np.float32)}}, "slot 'sum' must be float32 of shape"),
        ({"slots": {"sum": np.zeros(8, np.float32)[::2]}}, "writable and C-contiguous"),
        ({"gradients": np.zeros((2, 2), np.float32)}, "gradients must be float32 of shape"),
        ({"rows": np.zeros(1)}, "rows must be int32"),
    ],
)
def test_bad_updates(change, message):
    arguments = {
        "optimizer": ops.RowWiseAdagrad(learning_rate=0.1),
        "table": np.zeros((4, 2), np.float32),
        "slots": {"sum": np.zeros(4, np.float32)},
        "rows": np.zeros(1, np.int32),
        "gradients": np.zeros((1, 2), np.float32),
    }
    with pytest.raises(ValueError, match=message):
        host.row_update(**(arguments | change))


def test_a_read_only_table_is_refused():
    table = np.zeros((4, 2), np.float32)
    table.flags.writeable = False
    with pytest.raises(ValueError, match="table is written in place"):
        host.row_update(ops.SGD(learning_rate=0.1), table, {}, np.zeros(1, np.int32), np.zeros((1, 2), np.float32))


def test_thread_count_follows_the_environment(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.delenv("JREC_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.num_threads() == 16
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert threads.num_threads() == 6
    monkeypatch.setenv("JREC_NUM_THREADS", "3")
    assert threads.num_threads() == 3
    monkeypatch.setenv("JREC_NUM_THREADS", "99")
    assert threads.num_threads() == 16
    monkeypatch.setenv("JREC_NUM_THREADS", "none")
    with pytest.raises(ValueError, match="JREC_NUM_THREADS='none'"):
        threads.num_threads()


def test_tables_past_2_to_the_32_elements(tmp_path):
    """On sparse files, of which only the touched pages exist."""
    rows, dim = 2**25 + 1000, 128
    table = np.memmap(tmp_path / "table", np.float16, "w+", shape=(rows, dim))
    trace = np.memmap(tmp_path / "trace", np.float32, "w+", shape=(rows, dim))
    assert table.size > 2**32
    ids = np.array([[0], [rows - 1], [2**24 + 3], [2**25 + 1]], np.int32)
    gradients = -np.arange(1, 5, dtype=np.float32)[:, None] * np.ones(dim, np.float32)
    cast = host.tensor_cast(ids, num_rows=rows)
    host.casted_update(ops.Momentum(learning_rate=1.0), table, {"trace": trace}, cast, gradients, threads=2)
    np.testing.assert_array_equal(table[ids[:, 0]], -gradients.astype(np.float16))
    np.testing.assert_array_equal(trace[ids[:, 0]], gradients)
    np.testing.assert_array_equal(host.gather_reduce(table, ids), -gradients)
    wrapped = (ids[:, 0].astype(np.int64) * dim * 2 % 2**32 // (dim * 2))[[1, 3]]  # where 32-bit addresses would land
    assert not table[wrapped].any()
