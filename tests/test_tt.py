import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import tt_reference

from jrec.ops import SGD, Adagrad, Adam, Bags, RowWiseAdagrad, embedding_bag, rounding, tensor_cast
from jrec.ops.tt import (
    TTShape,
    TTTraffic,
    explain,
    tt_apply_gradients,
    tt_core_gradients,
    tt_embedding_bag,
    tt_init,
    tt_init_slots,
    tt_lookup,
)
from jrec.ops.tt import contract as contractions
from jrec.ops.tt import lookup as phases
from jrec.ops.tt.index import tt_index

SHAPES = {
    "2 cores": TTShape.search(300, 12, num_cores=2, ranks=5),
    "3 cores": TTShape.search(997, 16, ranks=(6, 9)),
    "4 cores": TTShape.search(1003, 24, num_cores=4, ranks=(3, 8, 5)),
    "flat": TTShape(rows=50, dim=6, row_factors=(5, 3, 4), dim_factors=(1, 6, 1), ranks=(5, 4)),
    "one row": TTShape(rows=1, dim=8, row_factors=(1, 1, 1), dim_factors=(2, 2, 2), ranks=(2, 2)),
    "wide": TTShape.search(500, 128, ranks=(17, 40)),
}


def _slow(cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def _cores(shape, seed=0, dtype="float32"):
    return tt_init(shape, jax.random.key(seed), variance=1.0, dtype=dtype)


def _case(shape, bags, *, length=None, capacity=None, weighted=False, kind="uniform", seed=0):
    """As ``reference.make_case``, without the table itself."""
    fields = reference.Shape(rows=1, dim=shape.dim, bags=bags, length=length, capacity=capacity, weighted=weighted)
    rng = np.random.default_rng(seed)
    case = reference.make_case(fields, rng, kind=kind)
    return dataclasses.replace(
        case, ids=reference.draw_ids(rng, shape.rows, case.ids.size, kind).reshape(case.ids.shape)
    )


def _run(shape, cores, case, combiner="sum", contraction=None, implementation=None):
    """Output, core gradients, weight gradients."""
    program = _program(shape, combiner, contraction, implementation)
    return program(cores, case.ids, case.offsets, case.weights, case.bag_gradients)


@functools.cache
def _program(shape, combiner, contraction, implementation):
    @jax.jit
    def run(cores, ids, offsets, weights, gradient):
        def bag(cores, weights):
            return tt_embedding_bag(
                cores,
                shape,
                ids,
                offsets,
                weights=weights,
                combiner=combiner,
                contraction=contraction,
                implementation=implementation,
            )

        out, transpose = jax.vjp(bag, cores, weights)
        return out, *transpose(gradient)

    return run


def _check(shape, cores, case, way, combiner="sum", tolerance=2e-5):
    out, gradients, of_weights = _run(shape, cores, case, combiner, *way)
    host = [np.asarray(core).astype(np.float64) for core in cores]
    want, want_gradients, want_weights = tt_reference.bags(host, case.bags(), case.bag_gradients, combiner)
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance * max(1, np.abs(want).max()))
    for got, wanted in zip(gradients, want_gradients, strict=True):
        scale = max(1, np.abs(wanted).max())
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance * scale)
    if of_weights is not None:
        flat = np.asarray(of_weights).reshape(-1)
        for position, wanted in want_weights.items():
            assert flat[position] == pytest.approx(wanted, rel=1e-4, abs=1e-3)
        assert not np.delete(flat, list(want_weights)).any()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(["2 cores", "4 cores", "wide"], [("unique", "native")]),
        ("3 cores", (None, None)),
        *_slow([("4 cores", ("unique", "xla"))]),
        *_slow(itertools.product(["2 cores", "wide"], [("unique", "xla")])),
        *_slow([("one row", ("unique", "native")), ("2 cores", ("sample", "xla")), ("4 cores", ("dense", "xla"))]),
        *_slow(itertools.product(["flat", "4 cores"], [("sample", "native"), ("naive", "xla"), ("unique", "native")])),
        *_slow([("flat", ("unique", "xla")), ("wide", ("dense", "native")), ("one row", ("unique", "xla"))]),
    ],
    ids=str,
)
def test_padded_bags_and_every_gradient(name, way):
    shape = SHAPES[name]
    _check(shape, _cores(shape), _case(shape, 30, length=3, weighted=name != "flat", kind="half padding"), way)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(["3 cores"], [("unique", "native"), ("dense", "xla"), ("naive", "xla")]),
        *_slow(itertools.product(["3 cores"], [("unique", "xla"), ("dense", "native"), ("sample", "native")])),
        *_slow([("3 cores", ("sample", "xla"))]),
        *_slow([("4 cores", ("unique", "native")), ("2 cores", ("unique", "xla"))]),
    ],
    ids=str,
)
def test_ragged_bags_and_every_gradient(name, way):
    shape = SHAPES[name]
    for kind, seed in (("power law", 0), ("identical", 1), ("all padding", 2)):
        case = _case(shape, 25, capacity=80, weighted=True, kind=kind, seed=seed)
        _check(shape, _cores(shape), case, way, tolerance=1e-4 if kind == "identical" else 2e-5)


@pytest.mark.parametrize("ragged", [False, True])
def test_neighbouring_bags_of_one_prefix_keep_their_own_sums(ragged):
    """EL-Rec's reuse within a bag: the last row of a bag and the first one of the next share a prefix here."""
    shape = TTShape(rows=12, dim=4, row_factors=(3, 4), dim_factors=(2, 2), ranks=(3,))
    cores, ids = _cores(shape), jnp.array([[4, 5], [6, 4], [7, 7]], jnp.int32)
    given = (ids.reshape(-1), jnp.array([0, 2, 4, 6], jnp.int32)) if ragged else (ids, None)
    rows = tt_embedding_bag(cores, shape, ids.reshape(-1, 1), contraction="naive")
    found = tt_embedding_bag(cores, shape, *given, contraction="sample", implementation="xla")
    np.testing.assert_allclose(found, rows.reshape(3, 2, 4).sum(axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("combiner", "contraction"),
    [
        ("mean", "unique"),
        ("max", "unique"),
        *_slow([("sqrtn", "sample"), ("mean", "naive"), ("max", "sample"), ("max", "dense"), ("max", "naive")]),
    ],
)
def test_combiners(combiner, contraction):
    shape = SHAPES["3 cores"]
    if contraction == "naive":
        _check(shape, _cores(shape), _case(shape, 20, length=4, kind="half padding"), (contraction, None), combiner)
    _check(shape, _cores(shape), _case(shape, 20, capacity=50, weighted=True), (contraction, None), combiner)


def test_a_maximum_is_that_of_the_rows_that_cores_stand_for():
    """Repeated ids share a gradient as equal rows of a plain table do; empty and padded bags, ids behind the bags."""
    shape, rng = SHAPES["2 cores"], np.random.default_rng(0)
    cores = _cores(shape)
    table = jnp.asarray(tt_reference.dense([np.asarray(core) for core in cores], shape.rows), jnp.float32)
    padded = rng.integers(-4, 9, (20, 5)).astype(np.int32)
    padded[3] = -1
    ragged = np.append(rng.integers(0, 9, 34), [shape.rows, -7, 2**31 - 1]).astype(np.int32)
    offsets = np.sort(np.append(rng.integers(0, 34, 19), [0, 34])).astype(np.int32)
    offsets[7:9] = offsets[7]
    for ids, of in ((jnp.asarray(padded), None), (jnp.asarray(ragged), jnp.asarray(offsets))):
        weights = jnp.asarray(rng.choice([-1, 2], ids.shape), jnp.float32)
        gradient = jnp.asarray(rng.normal(size=(20, shape.dim)), jnp.float32)

        @jax.jit
        def run(cores, table, weights, gradient, ids=ids, of=of):
            def on_cores(cores, weights):
                return tt_embedding_bag(cores, shape, ids, of, weights=weights, combiner="max")

            def on_rows(table, weights):
                return embedding_bag(table, ids, of, weights=weights, combiner="max")

            (out, transpose), (want, wanted) = jax.vjp(on_cores, cores, weights), jax.vjp(on_rows, table, weights)
            return out, want, transpose(gradient), wanted(gradient)

        out, want, (of_cores, of_weights), (of_table, of_wanted) = run(cores, table, weights, gradient)
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(of_weights, of_wanted, rtol=2e-4, atol=2e-4)
        sums = [np.zeros(core.shape) for core in cores]
        for row in np.flatnonzero(np.any(np.asarray(of_table) != 0, axis=1)):
            host = [np.asarray(core, np.float64) for core in cores]
            tt_reference.add_core_gradients(host, int(row), np.asarray(of_table[row], np.float64), sums)
        for got, wanted_core in zip(of_cores, sums, strict=True):
            np.testing.assert_allclose(got, wanted_core, rtol=1e-4, atol=1e-4 * np.abs(wanted_core).max())


@pytest.mark.parametrize(
    ("rank", "contraction", "implementation"),
    [
        (32, "unique", "native"),
        *_slow([(8, "unique", "native"), (32, "unique", "xla"), (8, "dense", "xla"), (32, "dense", "xla")]),
    ],
)
def test_largest_kaggle_table(rank, contraction, implementation):
    """200 x 220 x 250 slices: shapes at which fused updates elsewhere are known to miss slices."""
    shape = TTShape(rows=10_131_227, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(rank, rank))
    case = _case(shape, 300, length=1)
    case.ids[:4, 0] = [0, 10_131_226, 10_999_999 - 868_773, 2**23 + 1]
    _check(shape, _cores(shape), case, (contraction, implementation), tolerance=5e-5)


@pytest.mark.parametrize("contraction", ["unique", *_slow([("sample",), ("naive",)])])
def test_rows_beyond_what_float32_counts(contraction):
    shape = TTShape.search(2**31 - 1, 8, ranks=4)
    case = _case(shape, 12, length=1)
    case.ids[:6, 0] = [2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, 2**31 - 3, 2**31 - 2]
    _check(shape, _cores(shape), case, (contraction, None))


def test_a_table_whose_strides_pass_int32():
    shape = TTShape(rows=2**31 - 1, dim=4, row_factors=(1, 46341, 46341), dim_factors=(1, 2, 2), ranks=(1, 2))
    case = _case(shape, 8, length=1)
    case.ids[:2, 0] = [2**31 - 2, 46340]
    _check(shape, _cores(shape), case, ("unique", None))


def test_gradients_equal_autodiff_in_float64():
    shape = SHAPES["4 cores"]
    case = _case(shape, 20, length=3)
    cores = _cores(shape)
    out, gradients, _ = _run(shape, cores, case, contraction="unique")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(np.asarray(core), jnp.float64) for core in cores]

        def table_loss(cores):
            whole = jnp.einsum("aibj,cjdk,ekfl,glhm->acegbdfh", *cores).reshape(-1, shape.dim)
            pooled = jnp.where((case.ids >= 0)[..., None], whole[case.ids], 0.0).sum(1)
            return jnp.sum(pooled * jnp.asarray(case.bag_gradients, jnp.float64)), pooled

        (_, pooled), want = jax.value_and_grad(table_loss, has_aux=True)(wide)
        pooled, want = np.asarray(pooled), [np.asarray(g) for g in want]
    np.testing.assert_allclose(out, pooled, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(gradients, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "way", [("unique", "native"), *_slow([(("dense", "xla"),), (("sample", "xla"),), (("naive", "xla"),)])], ids=str
)
def test_bfloat16_cores_are_multiplied_and_summed_in_float32(way):
    shape = SHAPES["3 cores"]
    cores, case = _cores(shape, dtype="bfloat16"), _case(shape, 30, length=3)
    out, gradients, _ = _run(shape, cores, case, "sum", *way)
    host = [np.asarray(core).astype(np.float64) for core in cores]
    want, want_gradients, _ = tt_reference.bags(host, case.bags(), case.bag_gradients, "sum")
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        assert got.dtype == jnp.bfloat16
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "way",
    [("unique", "native"), *_slow([(("unique", "xla"),), (("sample", "xla"),), (("naive", "xla"),)])],
    ids=str,
)
def test_ids_past_the_table_make_their_bag_nan_and_no_other(way):
    shape = SHAPES["3 cores"]
    case = _case(shape, 10, length=2)
    case.ids[4, 1] = shape.rows
    case.ids[7, 0] = 2**31 - 1
    out, gradients, _ = _run(shape, _cores(shape), case, "sum", *way)
    bad = np.isin(np.arange(10), [4, 7])
    assert np.isnan(np.asarray(out)[bad]).all()
    assert np.isfinite(np.asarray(out)[~bad]).all()
    if way[0] != "naive":
        assert all(np.isfinite(g).all() for g in gradients)
    with pytest.raises(ValueError, match=r"ids\[7, 0\] is 2147483647, but the table has 997 rows"):
        tt_embedding_bag(_cores(shape), shape, jnp.asarray(case.ids))


def test_no_lookups_and_no_bags():
    shape = SHAPES["3 cores"]
    cores = _cores(shape)
    for contraction in ("unique", "dense", "naive"):
        empty = tt_embedding_bag(cores, shape, jnp.zeros((3, 0), jnp.int32), contraction=contraction)
        np.testing.assert_array_equal(empty, np.zeros((3, 16)))
    gradient = jax.grad(lambda c: tt_embedding_bag(c, shape, jnp.zeros((0, 1), jnp.int32)).sum())(cores)
    assert all(not np.asarray(g).any() for g in gradient)


def test_native_results_do_not_depend_on_threads(monkeypatch):
    shape = TTShape.search(200_000, 16, ranks=16)
    case = _case(shape, 4000, length=1, kind="power law")
    runs = []
    for threads in ("1", "2"):
        monkeypatch.setenv("JREC_NUM_THREADS", threads)
        _program.cache_clear()
        runs.append(_run(shape, _cores(shape), case, "sum", "unique", "native")[:2])
    for one, two in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_xla_works_piece_by_piece(monkeypatch):
    """More entries than a piece holds, and a last piece that overlaps the one before."""
    from jrec.ops.tt import products

    shape = SHAPES["3 cores"]
    monkeypatch.setattr(products, "_PIECE_FLOATS", 900)
    _check(shape, _cores(shape), _case(shape, 301, length=1), ("unique", "xla"))


def test_two_phases_equal_one_and_optax_takes_the_gradients():
    shape = SHAPES["3 cores"]
    cores, case = _cores(shape), _case(shape, 40, capacity=90, weighted=True)
    out, gradients, _ = _run(shape, cores, case, "sum", "unique")
    bags = Bags(ids=jnp.asarray(case.ids), offsets=jnp.asarray(case.offsets), weights=jnp.asarray(case.weights))
    for cast in (None, tensor_cast(bags.ids, bags.offsets, num_rows=shape.rows)):
        given = Bags(ids=bags.ids, offsets=bags.offsets, weights=bags.weights, cast=cast)
        activations, residuals = tt_lookup(cores, shape, given, contraction="unique")
        np.testing.assert_array_equal(activations, out)
        got = tt_core_gradients(cores, shape, residuals, jnp.asarray(case.bag_gradients), contraction="unique")
        for one, two in zip(got, gradients, strict=True):
            np.testing.assert_array_equal(one, two)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optax.adam(0.1).update(got, optax.adam(0.1).init(cores), cores)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, cores)


@pytest.mark.parametrize(
    ("optimizer", "rank", "contraction", "implementation"),
    [
        (Adagrad(learning_rate=0.1), 32, "unique", None),
        *_slow(
            [
                (SGD(learning_rate=0.1), 8, "unique", "xla"),
                (SGD(learning_rate=0.1), 8, "dense", "xla"),
                (SGD(learning_rate=0.1), 32, "unique", "xla"),
                (SGD(learning_rate=0.1), 8, "unique", None),
                (Adagrad(learning_rate=0.1), 8, "unique", None),
                (RowWiseAdagrad(learning_rate=0.1), 8, "unique", None),
                (Adam(learning_rate=0.1), 8, "unique", None),
            ]
        ),
    ],
    ids=lambda value: str(value) if value is None or isinstance(value, str | int) else type(value).__name__,
)
def test_fused_update_steps_every_chosen_slice_and_no_other(optimizer, rank, contraction, implementation):
    shape = TTShape(rows=10_131_227, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(rank, rank))
    cores, case = _cores(shape), _case(shape, 700, length=1)
    slots = tt_init_slots(optimizer, cores)

    @functools.partial(jax.jit, static_argnames=("contraction", "implementation"))
    def step(cores, slots, ids, gradient, number, contraction, implementation):
        ways = {"contraction": contraction, "implementation": implementation}
        _, residuals = tt_lookup(cores, shape, Bags(ids=ids), **ways)
        return tt_apply_gradients(optimizer, cores, slots, shape, residuals, gradient, step=number, **ways)

    gradients = [np.asarray(g) for g in _run(shape, cores, case, "sum", "unique", "xla")[1]]
    new_cores, new_slots = step(cores, slots, case.ids, case.bag_gradients, 3, contraction, implementation)
    chosen = [set() for _ in cores]
    for row in case.ids[:, 0]:
        for k, digit in enumerate(tt_reference.digits_of(int(row), shape.row_factors)):
            chosen[k].add(digit)
    for k, (old, new) in enumerate(zip(cores, new_cores, strict=True)):
        table, updated = np.asarray(old).reshape(len(old), -1), np.asarray(new).reshape(len(old), -1)
        for digit in range(len(old)):
            row_slots = {name: np.asarray(slot)[digit].astype(np.float64) for name, slot in slots[k].items()}
            if digit not in chosen[k]:
                np.testing.assert_array_equal(updated[digit], table[digit])
                for name, slot in row_slots.items():
                    np.testing.assert_array_equal(np.asarray(new_slots[k][name])[digit], slot.astype(np.float32))
                continue
            slope = gradients[k].reshape(len(old), -1)[digit].astype(np.float64)
            want, want_slots = reference.step_row(
                optimizer, table[digit].astype(np.float64), slope, row_slots, step=3, scale=1.0
            )
            # Adam and Adagrad divide by the gradient's own size, which magnifies its rounding where it is near zero.
            np.testing.assert_allclose(updated[digit], want, rtol=1e-4, atol=1e-3 * 0.1)
            for name, slot in want_slots.items():
                np.testing.assert_allclose(np.asarray(new_slots[k][name])[digit], slot, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_bfloat16_cores_are_rounded_stochastically_by_key_core_and_slice(implementation):
    """Equal to the float32 step of the same cores, rounded by ``stochastic_round`` with each core's own key."""
    shape, optimizer, key = SHAPES["3 cores"], Adagrad(learning_rate=0.1), jnp.array([3, 9], jnp.uint32)
    cores, case = _cores(shape, dtype="bfloat16"), _case(shape, 40, length=1)
    slots, bags = tt_init_slots(optimizer, cores), Bags(ids=jnp.asarray(case.ids))

    @jax.jit
    def step(cores, key):
        ways = {"contraction": "unique", "implementation": implementation}
        _, residuals = tt_lookup(cores, shape, bags, **ways)
        gradients = jnp.asarray(case.bag_gradients)
        return tt_apply_gradients(optimizer, cores, slots, shape, residuals, gradients, rounding_key=key, **ways)[0]

    rounded = step(cores, key)
    exact = step(tuple(core.astype(jnp.float32) for core in cores), key)
    for k, (got, full, old) in enumerate(zip(rounded, exact, cores, strict=True)):
        values, slices = full.reshape(len(full), -1), jnp.arange(len(full), dtype=jnp.int32)
        want = rounding.stochastic_round(values, jnp.bfloat16, rounding.derived_key(key, k), slices)
        untouched = np.all(np.asarray(full) == np.asarray(old, np.float32), axis=(1, 2, 3))
        want = jnp.where(untouched[:, None], old.reshape(len(old), -1), want)
        np.testing.assert_array_equal(np.asarray(got.reshape(len(got), -1)), np.asarray(want))
        assert not np.array_equal(np.asarray(got), np.asarray(full.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match="rounding"):
        step(cores, jnp.zeros(3, jnp.uint32))


def test_unique_capacity_overflow_is_nan_and_told():
    shape = SHAPES["3 cores"]
    ids = jnp.asarray([[5], [900], [5], [31]], jnp.int32)
    out, residuals = tt_lookup(_cores(shape), shape, Bags(ids=ids), unique_capacity=2)
    assert int(residuals.index.cast.num_unique) == 3
    assert np.isnan(out).all(axis=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", ["2 cores", pytest.param("4 cores", marks=pytest.mark.slow)])
def test_gradients_summed_by_segments_equal_those_added_in_order(name):
    """What a GPU runs: no sum depends on the order in which a device adds."""
    from jrec.ops.tt import products

    shape = SHAPES[name]
    ids = _case(shape, 300, length=1, kind="power law").ids
    index, below = jax.jit(lambda ids: tt_index(shape, ids))(ids), _cores(shape)[0][:, 0]
    rng = np.random.default_rng(0)
    for k, level in enumerate(index.levels):
        core = _cores(shape)[k + 1]
        _, _, n, right = core.shape
        args = rng.standard_normal((level.capacity, below.shape[1], n * right), np.float32), below, products._flat(core)
        segmented, added = (
            jax.jit(way)(*args, level) for way in (products._segmented_transpose, products._scattered_transpose)
        )
        for one, two in zip(segmented, added, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
        below = rng.standard_normal((level.capacity, below.shape[1] * n, right), np.float32)
    text = jax.jit(products._segmented_transpose).lower(*args, level).as_text()
    scatters = [line for line in text.splitlines() if "stablehlo.scatter" in line]
    assert all("unique_indices = true" in line or "f32" not in line for line in scatters)


@pytest.mark.slow
def test_gradients_hold_no_core_slice_per_lookup():
    """TT-Rec makes (lookups, R, n, R') of core gradients; here memory grows with the products of unique prefixes."""
    shape = TTShape(rows=10_131_227, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(32, 32))
    cores = _cores(shape)

    def temporary(lookups, contraction, table=shape):
        def gradients(cores, ids, gradient):
            bag = functools.partial(
                tt_embedding_bag, shape=table, ids=ids, contraction=contraction, implementation="xla"
            )
            return jax.vjp(bag, cores)[1](gradient)

        arrays = (cores, jnp.zeros((lookups, 1), jnp.int32), jnp.zeros((lookups, 16)))
        return jax.jit(gradients).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    lookups = 1 << 15
    slices = 4 * lookups * 32 * 2 * 32
    assert temporary(lookups, "naive") > slices
    unique = temporary(lookups, "unique")
    assert unique < slices / 2
    products = 4 * lookups * 4 * 32
    assert temporary(2 * lookups, "unique") - unique < 6 * products
    same_cores = TTShape(rows=1_000_000, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(32, 32))
    assert temporary(lookups, "unique", same_cores) == unique


def test_explain_says_what_and_why():
    shape = TTShape(rows=10_131_227, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(32, 32))
    choice = explain(shape, 32768, platform="cpu")
    assert (choice.forward, choice.backward) == ("unique", "unique")
    assert "32,768 lookups with" in str(choice)
    assert "unique rows, on CPU, native kernels" in str(choice)
    assert set(choice.forward_seconds) == {"naive", "unique", "dense", "sample"}
    assert choice.forward_seconds[choice.forward] == min(choice.forward_seconds.values())
    assert set(explain(shape.search(1000, 16, num_cores=2, ranks=4), 64).backward_seconds) == {"unique"}
    # Bags of 164 rows with one prefix each, that no other bag has; products of long rows cost more than sums.
    alone = TTTraffic(lookups=32768, entries=(200, 32768), pairs=200)
    wide = TTShape(rows=10_131_227, dim=64, row_factors=(200, 220, 250), dim_factors=(4, 4, 4), ranks=(32, 32))
    assert explain(shape, 32768, traffic=alone).forward == "unique"
    assert explain(wide, 32768, platform="gpu", traffic=alone).forward == "sample"
    with pytest.raises(ValueError, match="platform 'tpu' is unknown"):
        explain(shape, 32768, platform="tpu")


def test_traffic_is_counted_and_expected():
    shape = TTShape(rows=10_131_227, dim=16, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(32, 32))
    ids = np.array([[0, 249, 250], [0, 0, -1]])
    assert TTTraffic.of(shape, ids) == TTTraffic(lookups=5, entries=(2, 3), pairs=3)
    assert TTTraffic.of(shape, np.array([0, 249, 250, 7]), np.array([0, 1, 3])) == TTTraffic(
        lookups=3, entries=(2, 3), pairs=3
    )
    rng = np.random.default_rng(0)
    weights = np.arange(1, shape.rows + 1, dtype=np.float64) ** -1.05
    draws = np.searchsorted(np.cumsum(weights), rng.random((8192, 1)) * weights.sum())
    counted, expected = TTTraffic.of(shape, draws), TTTraffic.expected(shape, 8192)
    np.testing.assert_allclose(expected.entries, counted.entries, rtol=0.05)
    assert expected.pairs == counted.pairs == 8192
    counted, expected = TTTraffic.of(shape, draws.reshape(128, 64)), TTTraffic.expected(shape, 8192, bags=128)
    np.testing.assert_allclose(expected.pairs, counted.pairs, rtol=0.05)
    np.testing.assert_allclose(expected.entries, counted.entries, rtol=0.05)


def test_the_choice_knows_how_long_bags_are(monkeypatch):
    shape, asked = SHAPES["3 cores"], []
    original = phases.explain
    monkeypatch.setattr(phases, "explain", lambda *a, **k: asked.append((a[1], k["bags"])) or original(*a, **k))
    cores, ids = _cores(shape), jnp.zeros((4, 6), jnp.int32)
    jax.eval_shape(lambda c: tt_embedding_bag(c, shape, ids), cores)
    jax.eval_shape(lambda c: tt_embedding_bag(c, shape, ids.reshape(-1), jnp.arange(0, 25, 8, dtype=jnp.int32)), cores)
    assert {*asked} == {(24, 4), (24, 3)}


def test_the_choice_is_made_for_the_platform_of_lowering(monkeypatch):
    shape = SHAPES["3 cores"]
    cores, ids = _cores(shape), jnp.asarray([[3], [900]], jnp.int32)
    seen = []
    original = contractions.expand
    monkeypatch.setattr(contractions, "expand", lambda *a, **k: seen.append(k["method"]) or original(*a, **k))
    many = TTTraffic(lookups=10**9, entries=(10**8, 10**9), pairs=10**9)
    out = jax.jit(lambda c: tt_embedding_bag(c, shape, ids, traffic=many))(cores)
    assert {"grouped", "dense"} <= set(seen)
    np.testing.assert_allclose(out, tt_embedding_bag(cores, shape, ids, contraction="naive"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": jnp.zeros((), jnp.int32)}, "ids must have shape"),
        ({"ids": jnp.zeros((3, 1), jnp.float32)}, "ids must be integers"),
        ({"combiner": "most"}, "combiner 'most' is unknown; choose sum, mean, sqrtn or max"),
        ({"contraction": "fast"}, "contraction 'fast' is unknown"),
        ({"implementation": "cuda"}, "implementation='cuda' is unknown"),
        ({"cores": _cores(SHAPES["2 cores"])}, "the cores have shapes"),
        (
            {"cores": tuple(c.astype(jnp.float16) for c in _cores(SHAPES["3 cores"]))},
            "core 0 .*, but is float16",
        ),
        ({"weights": jnp.ones((2, 1))}, "weights must be float32"),
    ],
)
def test_bad_arguments_raise(change, message):
    arguments = {"cores": _cores(SHAPES["3 cores"]), "shape": SHAPES["3 cores"], "ids": jnp.zeros((3, 1), jnp.int32)}
    with pytest.raises(ValueError, match=message):
        tt_embedding_bag(**{**arguments, **change})


def test_what_does_not_apply_raises():
    shape = SHAPES["2 cores"]
    cores, bags = _cores(shape), Bags(ids=jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(ValueError, match="two cores have no prefix product"):
        tt_lookup(cores, shape, bags, contraction="dense")
    with pytest.raises(ValueError, match="'naive' exists only in tt_embedding_bag"):
        tt_lookup(cores, shape, bags, contraction="naive")
    _, residuals = tt_lookup(cores, shape, bags)
    with pytest.raises(ValueError, match="gradients must be float32 of shape"):
        tt_core_gradients(cores, shape, residuals, jnp.zeros((3, 5)))
    with pytest.raises(ValueError, match=r"core 0: Adagrad keeps slots \['sum'\], but was given \[\]"):
        tt_apply_gradients(
            Adagrad(learning_rate=1.0), cores, ({}, {}), shape, residuals, jnp.zeros((3, 12)), contraction="unique"
        )
    with pytest.raises(ValueError, match="make them with tt_init_slots"):
        tt_apply_gradients(SGD(learning_rate=1.0), cores, (), shape, residuals, jnp.zeros((3, 12)))
    huge = TTShape(rows=2**31 - 1, dim=4, row_factors=(46341, 46341, 1), dim_factors=(2, 2, 1), ranks=(1, 1))
    with pytest.raises(ValueError, match="use contraction 'unique'"):
        tt_lookup(tt_init(huge, jax.random.key(0)), huge, bags, contraction="dense")
