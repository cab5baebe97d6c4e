"""Tables divided by rows under plain ``jit``: each device works on its own rows, and no device gathers the table."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrec import ops
from jrec.ops.tt import TTShape, tt_apply_gradients, tt_init_slots, tt_lookup

ROWS, DIM, BAGS, LENGTH = 400, 8, 16, 5
OPTIMIZER = ops.Adam(learning_rate=0.1)
KEY = jnp.array([3, 4], jnp.uint32)
SLOW = pytest.mark.slow


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def _mesh(*sizes):
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("x", "y")[: len(sizes)])


def _table(rng, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=(ROWS, DIM)), dtype)


def _bags(rng, ragged, weighted=True):
    """Bags with padding, whose first one is empty."""
    ids = np.array(rng.integers(-1, ROWS, (BAGS, LENGTH)), np.int32)
    ids[0] = -1
    weights = jnp.asarray(rng.normal(size=ids.shape), jnp.float32) if weighted else None
    if not ragged:
        return ops.Bags(ids=jnp.asarray(ids), weights=weights)
    offsets = np.sort(rng.integers(0, ids.size + 1, BAGS + 1)).astype(np.int32)
    offsets[0] = 0
    return ops.Bags(
        ids=jnp.asarray(ids.reshape(-1)),
        offsets=jnp.asarray(offsets),
        weights=None if weights is None else weights.reshape(-1),
    )


def _divided(mesh, tree, *spec):
    """The arrays on the mesh, their leading dimensions divided."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))), tree)


def _assert_nothing_of_the_tables_size(compiled):
    """No array of as many rows as the whole table has, which a device would have to gather."""
    assert not re.search(rf"\[{ROWS}[,\]]", compiled.as_text())


def _run(function, divided, whole, rtol=1e-5):
    """Runs on a mesh and on one device, compares, and returns the mesh's program and results."""
    compiled = jax.jit(function).lower(*divided).compile()
    got, want = compiled(*divided), jax.jit(function)(*whole)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), rtol, 1e-6),
        got, want,
    )  # fmt: skip
    return compiled, got


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("batch", ["x", pytest.param(None, marks=SLOW)])
@pytest.mark.parametrize("implementation", [None, pytest.param("xla", marks=SLOW), pytest.param("native", marks=SLOW)])
def test_a_step_gathers_no_table(implementation, batch, ragged, rng):
    table, bags, mesh = _table(rng), _bags(rng, ragged), _mesh(4)

    def step(table, slots, bags):
        options = {"implementation": implementation}
        activations, residuals = ops.lookup({"t": table}, {"t": bags}, **options)
        gradients = jax.tree.map(jnp.cos, activations)
        new = ops.apply_gradients(OPTIMIZER, {"t": table}, {"t": slots}, residuals, gradients, step=1, **options)
        return activations["t"], new

    slots = OPTIMIZER.init(table)
    divided = (*_divided(mesh, (table, slots), "x", None), _divided(mesh, bags, None if ragged else batch, None))
    compiled, (_, (tables, new_slots)) = _run(step, divided, (table, slots, bags))
    _assert_nothing_of_the_tables_size(compiled)
    for state in jax.tree.leaves((tables, new_slots)):
        assert state.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), state.ndim)


def test_a_donated_table_is_updated_where_it_lies(rng):
    table, bags, mesh = _table(rng), _bags(rng, ragged=False), _mesh(4)

    def step(table, bags):
        activations, residuals = ops.lookup({"t": table}, {"t": bags})
        new, _ = ops.apply_gradients(ops.SGD(learning_rate=0.1), {"t": table}, {"t": {}}, residuals, activations)
        return new["t"]

    arguments = _divided(mesh, table, "x", None), _divided(mesh, bags, "x", None)
    memory = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == table.nbytes // 4


@pytest.mark.parametrize("sizes", [(4,), pytest.param((2, 2), marks=SLOW)])
def test_dense_gradients_stay_divided(sizes, rng):
    table, bags, mesh = _table(rng), _bags(rng, ragged=False), _mesh(*sizes)

    def gradients(table, bags):
        def loss(table, weights):
            return jnp.sum(jnp.sin(ops.embedding_bag(table, bags.ids, weights=weights)))

        by_table, by_weights = jax.grad(loss, (0, 1))(table, bags.weights)
        return jax.lax.with_sharding_constraint(by_table, NamedSharding(mesh, P("x", None))), by_weights

    divided = _divided(mesh, table, "x", None), _divided(mesh, bags, mesh.axis_names[-1], None)
    compiled = jax.jit(gradients).lower(*divided).compile()
    _assert_nothing_of_the_tables_size(compiled)
    got = compiled(*divided)
    rows = jnp.where((bags.ids >= 0)[..., None], jnp.take(table, jnp.maximum(bags.ids, 0), axis=0), 0)
    slope = jnp.cos(jnp.sum(rows * bags.weights[..., None], axis=1))
    shares = (slope[:, None, :] * bags.weights[..., None]).reshape(-1, DIM)
    want = jnp.zeros_like(table).at[jnp.where(bags.ids < 0, ROWS, bags.ids).reshape(-1)].add(shares, mode="drop")
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], jnp.sum(rows * slope[:, None, :], axis=-1), rtol=1e-4, atol=1e-5)


def test_rows_and_bags_over_axes_of_their_own(rng):
    """The bags stay divided over theirs, and each device sums over the rows of its own."""
    table, bags, mesh = _table(rng), _bags(rng, ragged=False), _mesh(2, 2)
    lookup = functools.partial(ops.gather_reduce, implementation="native")
    divided = _divided(mesh, table, "y", None), _divided(mesh, bags.ids, "x", None)
    compiled, out = _run(lookup, divided, (table, bags.ids))
    _assert_nothing_of_the_tables_size(compiled)
    assert "all-gather" not in compiled.as_text()
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None)), 2)


def test_replicated_rows_are_looked_up_where_the_bags_are(rng):
    table, bags, mesh = _table(rng), _bags(rng, ragged=False), _mesh(4)
    divided = _divided(mesh, table), _divided(mesh, bags.ids, "x", None)
    compiled, out = _run(functools.partial(ops.gather_reduce, implementation="native"), divided, (table, bags.ids))
    assert not re.search("all-gather|all-reduce|reduce-scatter", compiled.as_text())
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None)), 2)


def test_columns_stay_divided_in_a_lookup_and_are_refused_in_an_update(rng):
    table, bags, mesh = _table(rng), _bags(rng, ragged=True), _mesh(4)
    divided = _divided(mesh, table, None, "x"), _divided(mesh, bags)

    def lookup(table, bags):
        return ops.gather_reduce(table, bags.ids, bags.offsets, weights=bags.weights)

    compiled, out = _run(lookup, divided, (table, bags))
    assert "all-gather" not in compiled.as_text()
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 2)

    @jax.jit
    def update(table):
        rows, gradients = jnp.arange(3, dtype=jnp.int32), jnp.ones((3, DIM))
        return ops.row_update(ops.SGD(learning_rate=0.1), table, {}, rows, gradients)

    with pytest.raises(Exception, match=r"divided evenly by rows, not .*; call the op inside jax.shard_map"):
        update(divided[0])


@pytest.mark.parametrize("implementation", [None, pytest.param("xla", marks=SLOW)])
def test_cores_divided_by_slices(implementation, rng):
    """Their steps take a row for each slice, in its place, of which some are padding: these rows do not ascend."""
    shape = TTShape.search(1000, 8, ranks=4)
    cores = ops.tt_init(shape, jax.random.key(0))
    slots = tt_init_slots(OPTIMIZER, cores)
    ids, gradients = jnp.array([[3, 7], [711, 712]], jnp.int32), jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)
    assert all(core.shape[0] % 2 == 0 for core in cores)

    def step(cores, slots):
        _, residuals = tt_lookup(cores, shape, ops.Bags(ids=ids), implementation=implementation)
        return tt_apply_gradients(OPTIMIZER, cores, slots, shape, residuals, gradients, implementation=implementation)

    _run(step, _divided(_mesh(2), (cores, slots), "x"), (cores, slots))


@pytest.mark.parametrize("seeded", [False, True])
def test_rows_of_16_bits_are_rounded_by_their_numbers_in_the_whole_table(seeded, rng):
    """To the same bits, for which the random ones must be those of the whole table's rows."""
    table, mesh = _table(rng, jnp.bfloat16), _mesh(4)
    rows = jnp.asarray([1, 99, 100, 250, 399, ROWS, ROWS], jnp.int32)  # of three devices; two are padding
    gradients = jnp.asarray(rng.normal(size=(7, DIM)), jnp.float32)
    update = jax.jit(
        lambda table, rows, gradients: ops.row_update(
            OPTIMIZER, table, OPTIMIZER.init(table), rows, gradients, rounding_key=KEY if seeded else None
        )[0]
    )
    got = update(_divided(mesh, table, "x", None), *_divided(mesh, (rows, gradients)))
    np.testing.assert_array_equal(got, update(table, rows, gradients))
    assert np.sum(np.any(np.asarray(got != table), axis=1)) == 5


def test_bad_ids_and_offsets_are_nan_as_on_one_device(rng):
    table, mesh = _table(rng), _mesh(4)
    ids = jnp.array([[0, ROWS], [399, -1], [-7, 5], [ROWS + 200, 1]], jnp.int32)
    ragged = ids.reshape(-1), jnp.array([0, 1, 5, 2, 9], jnp.int32)
    for arguments in ((ids,), ragged):
        lookup = functools.partial(ops.gather_reduce, implementation="native")
        _, out = _run(lookup, (_divided(mesh, table, "x", None), *_divided(mesh, arguments)), (table, *arguments))
        assert np.isnan(out).any()
        assert not np.isnan(out).all()


def test_vmap_over_divided_tables(rng):
    """Batches are run one after another, by what XLA does with custom calls."""
    tables, ids = jnp.stack([_table(rng), _table(rng)]), _bags(rng, ragged=False).ids
    lookup = jax.vmap(functools.partial(ops.gather_reduce, implementation="native"), in_axes=(0, None))
    _run(lookup, (_divided(_mesh(4), tables, None, "x", None), ids), (tables, ids))


def test_one_device_has_no_rules(rng):
    table, bags = _table(rng), _bags(rng, ragged=False)
    text = jax.jit(ops.gather_reduce).lower(table, bags.ids).as_text()
    assert "jrec_gather_reduce" in text
    assert "CustomSPMDPartitioning" not in text
    divided = _divided(_mesh(4), table, "x", None)
    assert "CustomSPMDPartitioning" in jax.jit(ops.gather_reduce).lower(divided, bags.ids).as_text()


def test_the_gradient_of_a_linear_loss_needs_devices_too(rng):
    """Its only custom call is within the derivative."""
    table, bags, mesh = _table(rng), _bags(rng, ragged=False), _mesh(4)

    def gradient(table, ids):
        return jax.grad(lambda table: jnp.sum(ops.embedding_bag(table, ids)))(table)

    _run(gradient, (_divided(mesh, table, "x", None), _divided(mesh, bags.ids, "x", None)), (table, bags.ids))


def test_other_axes_of_a_shard_map_are_left_to_xla(rng):
    table, bags, mesh = _table(rng), _bags(rng, ragged=False), _mesh(2, 2)
    lookup = jax.shard_map(
        ops.gather_reduce, mesh=mesh, in_specs=(P(), P("y")), out_specs=P("y"), axis_names={"y"}, check_vma=False
    )
    got = jax.jit(lookup)(_divided(mesh, table, "x", None), bags.ids)
    np.testing.assert_allclose(got, ops.gather_reduce(table, bags.ids), rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[False, True], ids=["types alone", "set_mesh"])
def explicit(request):
    """A mesh of Explicit axes, and whether it is set or only known from the arrays' types."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh) if request.param else contextlib.nullcontext():
        yield mesh


def _types(tree):
    return jax.tree.map(lambda x: jax.typeof(x).str_short(short_dtypes=True), tree)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_step_over_explicit_axes(implementation, explicit, rng):
    """Bags over one, rows over the other: results are divided as ids and tables are, and no table is gathered."""
    table, bags, options = _table(rng), _bags(rng, ragged=False), {"implementation": implementation}

    def step(table, slots, bags):
        activations, residuals = ops.lookup({"t": table}, {"t": bags}, **options)
        gradients = jax.tree.map(jnp.cos, activations)
        norm = ops.squared_gradient_norm(residuals, gradients, **options)
        new = ops.apply_gradients(OPTIMIZER, {"t": table}, {"t": slots}, residuals, gradients, **options)
        of_table = jax.grad(lambda t: jnp.sum(jnp.sin(ops.embedding_bag(t, bags.ids, weights=bags.weights, **options))))
        return activations["t"], norm, new, of_table(table)

    slots = OPTIMIZER.init(table)
    divided = (*_divided(explicit, (table, slots), "y", None), _divided(explicit, bags, "x", None))
    compiled, got = _run(step, divided, (table, slots, bags), rtol=1e-4)
    _assert_nothing_of_the_tables_size(compiled)
    activations, norm, state, gradient = _types(got)
    assert (activations, norm) == ("f32[16@x,8]", "f32[]")
    assert {*jax.tree.leaves(state), gradient} == {"f32[400@y,8]"}


@pytest.mark.parametrize("form", ["ids of one", "ragged", "several features"])
def test_forms_and_columns_over_explicit_axes(form, explicit, rng):
    table, ids, offsets = _table(rng), jnp.asarray(rng.integers(0, ROWS, 16), jnp.int32), None
    if form == "ragged":
        offsets = jnp.asarray([0, 3, 3, 16], jnp.int32)
    if form == "several features":
        ids = ids.reshape(4, 2, 2)
    on = (_divided(explicit, table, None, "y"), _divided(explicit, ids, "x", None, None))
    got = jax.jit(ops.embedding_bag)(*on, offsets)
    np.testing.assert_allclose(got, ops.embedding_bag(table, ids, offsets), rtol=1e-5)
    of_form = {"ids of one": "16@x,8@y", "ragged": "3,8@y", "several features": "4@x,2,8@y"}
    assert _types(got) == f"f32[{of_form[form]}]"
    if offsets is None:  # the axis is the bags'
        on = (_divided(explicit, table, None, "x"), on[1])
        assert _types(ops.embedding_bag(*on)) == f"f32[{of_form[form].replace('@y', '')}]"


@pytest.mark.parametrize("implementation", [None, pytest.param("xla", marks=SLOW)])
def test_a_cached_tensor_train_over_explicit_axes(implementation, explicit, rng):
    shape, config = ops.TTShape.search(ROWS, DIM, ranks=2), ops.TTCacheConfig(cache_rows=4, warmup_steps=1)
    cores, bags = ops.tt_init(shape, jax.random.key(0)), _bags(rng, ragged=False)
    cache, slots = ops.tt_cache_init(config, shape, OPTIMIZER), ops.tt_init_slots(OPTIMIZER, cores)
    options = {"implementation": implementation}

    def step(cores, slots, cache, bags):
        activations, left = ops.tt_cached_lookup(cores, cache, shape, bags, **options)
        cores, slots, cache = ops.tt_cached_apply_gradients(
            OPTIMIZER, cores, slots, cache, shape, left, jnp.cos(activations), **options
        )
        cache = ops.tt_cache_step(config, OPTIMIZER, cores, cache, shape, left.cast, step=0, **options)
        again, left = ops.tt_lookup(cores, shape, bags, **options)
        return activations, cores, slots, cache, again, ops.tt_core_gradients(cores, shape, left, again, **options)

    _, got = _run(step, (cores, slots, cache, _divided(explicit, bags, "x", None)), (cores, slots, cache, bags), 1e-4)
    assert _types((got[0], got[4])) == ("f32[16@x,8]",) * 2


def test_vmap_over_what_an_explicit_axis_divides(explicit, rng):
    """The bags' own types have no axis then."""
    table, ids = _table(rng), jnp.stack([_bags(rng, ragged=False).ids for _ in range(4)])
    lookup = jax.vmap(ops.embedding_bag, in_axes=(None, 0))
    _, got = _run(lookup, (_divided(explicit, table), _divided(explicit, ids, "x", None, None)), (table, ids))
    assert _types(got) == "f32[4@x,16,8]"


def test_explicit_axes_beside_those_of_a_shard_map(explicit, rng):
    table, ids = _table(rng), _bags(rng, ragged=False).ids
    over = {"in_specs": (P(), P("y")), "out_specs": P("y"), "axis_names": {"y"}}
    lookup = jax.shard_map(ops.embedding_bag, mesh=explicit, **over)
    on = (_divided(explicit, table), _divided(explicit, ids, ("y", "x"), None))
    _run(lookup, on, (table, ids))


def test_errors_over_explicit_axes_are_the_ops_own(explicit, rng):
    table, ids = _table(rng), _bags(rng, ragged=False).ids
    on = (_divided(explicit, table, "y", None), _divided(explicit, ids, "x", None))
    for call, match in (
        (lambda: ops.lookup({"t": on[0]}, {"t": on[1]}), "bags must be jrec.Bags"),
        (lambda: ops.embedding_bag(on[0], on[1].astype(jnp.float32)), "ids must be integers"),
        (lambda: ops.embedding_bag(on[0], on[1] + ROWS), "but the table has 400 rows"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
