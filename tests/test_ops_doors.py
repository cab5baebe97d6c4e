"""The ops' public doors: what does not fit is refused by name and number, never taken and never a slip's traceback."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jrec
from jrec import ops

ADAM = ops.Adam(learning_rate=0.1)
IDS = np.array([[0, -1], [1, 2]], np.int32)
BAGS = jrec.Bags(ids=IDS)
TABLE = np.ones((5, 4), np.float32)
GRADIENTS = np.ones((2, 4), np.float32)
AT = np.array([0, 2], np.int32)
OF_CORES = np.ones((2, 8), np.float32)
SHAPE = ops.TTShape(rows=60, dim=8, row_factors=(8, 8), dim_factors=(2, 4), ranks=(4,))
CACHE = ops.TTCacheConfig(cache_rows=4, warmup_steps=1)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "native"])


@functools.cache
def cores():
    return ops.tt_init(SHAPE, jax.random.key(0))


@functools.cache
def cache():
    return ops.tt_cache_init(CACHE, SHAPE, ADAM)


@functools.cache
def left(of="rows"):
    """Residuals of a lookup of two bags."""
    if of == "rows":
        return ops.lookup({"t": jnp.asarray(TABLE)}, {"t": BAGS})[1]
    if of == "cores":
        return ops.tt_lookup(cores(), SHAPE, BAGS)[1]
    return ops.tt_cached_lookup(cores(), cache(), SHAPE, BAGS)[1]


def apply(*, table=TABLE, slots=None, gradients=GRADIENTS, optimizer=ADAM, residuals=None, **options):
    slots = ADAM.init(jnp.asarray(table)) if slots is None else slots
    residuals = left() if residuals is None else residuals
    named = [{"t": one} for one in (table, slots, gradients)]
    return ops.apply_gradients(optimizer, *named[:2], residuals, named[2], **options)


def casted(*, table=TABLE, cast=None, gradients=GRADIENTS, **options):
    cast = left()["t"].cast if cast is None else cast
    return ops.casted_update(ADAM, table, ADAM.init(jnp.asarray(table)), cast, gradients, **options)


def rows(*, table=TABLE, at=AT, gradients=GRADIENTS, **options):
    return ops.row_update(ADAM, table, ADAM.init(jnp.asarray(table)), at, gradients, **options)


def of_cores(*, shape=SHAPE, slots=None, gradients=OF_CORES, residuals=None, **options):
    slots = ops.tt_init_slots(ADAM, cores()) if slots is None else slots
    residuals = left("cores") if residuals is None else residuals
    return ops.tt_apply_gradients(ADAM, cores(), slots, shape, residuals, gradients, **options)


def cached(*, gradients=OF_CORES, state=None, residuals=None, **options):
    slots, state = ops.tt_init_slots(ADAM, cores()), cache() if state is None else state
    residuals = left("cache") if residuals is None else residuals
    return ops.tt_cached_apply_gradients(ADAM, cores(), slots, state, SHAPE, residuals, gradients, **options)


def lookup(table=TABLE, bags=BAGS, **options):
    return ops.lookup({"t": table}, {"t": bags}, **options)


def tt_lookup(of=None, bags=BAGS, shape=SHAPE, **options):
    return ops.tt_lookup(cores() if of is None else of, shape, bags, **options)


THREE = np.ones((3, 4), np.float32)
FEWER = dataclasses.replace(SHAPE, rows=50)
HALF_SLOTS = {name: TABLE.astype(jnp.bfloat16) for name in ADAM.slots}


@functools.cache
def other():
    """The cast of other bags, for another table."""
    return ops.tensor_cast(np.zeros((3, 3), np.int32), num_rows=9)


def with_cast(cast, ids=IDS):
    return jrec.Bags(ids=ids, cast=cast)


# Arguments that are functions are called in the test.
REFUSED = [
    (apply, {"gradients": THREE}, r"table 't': gradients .*\(2, 4\), but is float32\[3, 4\]; 2 bags were looked up"),
    (apply, {"gradients": THREE[:1]}, r"table 't': gradients .*\(2, 4\), but is float32\[1, 4\]"),
    (apply, {"gradients": GRADIENTS[:, :3]}, r"but is float32\[2, 3\]"),
    (apply, {"gradients": GRADIENTS.astype(np.float64)}, r"gradients must be .* or bfloat16 .*, but is float64"),
    (apply, {"gradients": GRADIENTS.astype(jnp.float16)}, "but is float16"),
    (apply, {"gradients": GRADIENTS.astype(np.int32)}, "but is int32"),
    (apply, {"gradients": np.float32(1)}, r"but is float32\[\]"),
    (apply, {"gradients": [[1.0]]}, "gradients must be .*, but is of type list"),
    (apply, {"table": TABLE[:2]}, "table 't': the table has 2 rows, but the ids were cast for one of 5"),
    (apply, {"table": np.ones((9, 4), np.float32)}, "the table has 9 rows"),
    (apply, {"table": TABLE[:, :3]}, "its rows are float32 of 3 elements, but were float32 of 4 when looked up"),
    (apply, {"table": TABLE.astype(jnp.bfloat16)}, "its rows are bfloat16 of 4 elements"),
    (apply, {"table": TABLE.astype(np.int32)}, "table must be float32, bfloat16 or float16 .*, but is int32"),
    (apply, {"slots": HALF_SLOTS}, "slot 'mu' must be float32 .*, but is bfloat16"),
    (apply, {"slots": dict.fromkeys(ADAM.slots, 0.0)}, "slot 'mu' must be .*, but is of type float"),
    (apply, {"slots": [1]}, r"keeps slots \['mu', 'nu'\], but was given a list"),
    (apply, {"optimizer": object()}, "the optimizer must be one of jrec.ops"),
    (apply, {"residuals": lambda: {"t": other()}}, "the residuals must come from lookup"),
    (apply, {"gradient_scale": GRADIENTS[0]}, "gradient_scale must be a single number"),
    (apply, {"gradient_scale": "1"}, "gradient_scale must be a single number"),
    (apply, {"rounding_key": 3}, "a rounding key must be uint32"),
    (apply, {"dims": {"t": 1.5}}, "dim is 1.5, but rows hold 4"),
    (casted, {"gradients": THREE}, "2 bags were looked up"),
    (casted, {"table": TABLE[:2]}, "the table has 2 rows"),
    (casted, {"cast": IDS}, "the cast must be a jrec.Cast"),
    (casted, {"cast": lambda: dataclasses.replace(other(), num_rows=None, offsets=other().rows)}, r"offsets .*\(10,\)"),
    (casted, {"weights": np.ones((3, 2), np.float32)}, r"weights must be float32 for 4 lookups, .*\[3, 2\]"),
    (casted, {"weights": np.ones((2, 2), np.float16)}, "weights must be float32"),
    (casted, {"step": -1}, "step must be"),
    (rows, {"gradients": THREE}, r"gradients must be float32 of shape \(2, 4\), but is float32\[3, 4\]"),
    (rows, {"at": [0, 2]}, r"rows must be int32 of shape \(n,\).*, but is of type list"),
    (rows, {"at": np.array([0, 2])}, "but is int64"),
    (rows, {"table": TABLE.astype(np.int32)}, "table must be"),
    (rows, {"step": 0.5}, "step must be"),
    (ops.squared_gradient_norm, {"residuals": left, "gradients": {"t": THREE}}, "table 't': .* 2 bags were looked"),
    (ops.squared_gradient_norm, {"residuals": left, "gradients": {"t": np.ones((2, 5), np.float32)}}, "of dim 5"),
    (lookup, {"table": TABLE.astype(np.float64)}, "table 't': table must be .*, but is float64"),
    (lookup, {"table": TABLE.tolist()}, "table 't': table must be .*, but is of type list"),
    (lookup, {"table": TABLE[0]}, r"of shape \(rows, dim\), but is float32\[4\]"),
    (lookup, {"bags": IDS}, "table 't': bags must be jrec.Bags"),
    (lookup, {"bags": dataclasses.replace(BAGS, weights=[1.0])}, "weights must be .*, but is of type list"),
    (lookup, {"bags": lambda: with_cast(other())}, "the table has 5 rows, but the ids were cast for .* 9"),
    (lookup, {"bags": lambda: with_cast(left()["t"].cast, IDS[:1])}, "cast is of 4 lookups in 2 bags, .* hold 2 in 1"),
    *((lookup, {"unique_capacities": {"t": n}}, f"unique_capacity is {n!r}") for n in (-1, True, 2.5, "a", 2**31)),
    *((ops.tensor_cast, {"ids": IDS, "num_rows": n}, f"num_rows is {n!r}") for n in (-1, True, 2.5, "a", 2**31)),
    (ops.tensor_cast, {"ids": [[1]], "num_rows": 5}, "ids must be .* of type list"),
    (ops.gather_reduce, {"source": [[1.0]], "indices": IDS}, "source must be .* of type list"),
    (ops.gather_reduce, {"source": TABLE, "indices": [[1]]}, "indices must be .* of type list"),
    (ops.embedding_bag, {"table": TABLE.tolist(), "ids": IDS}, "table must be .* of type list"),
    (ops.embedding_bag, {"table": TABLE.astype(np.float64), "ids": IDS}, "table must be .*, but is float64"),
    (of_cores, {"gradients": np.ones((3, 8), np.float32)}, r"\(2, 8\), but is float32\[3, 8\]; 2 bags were looked up"),
    (of_cores, {"gradients": np.ones((1, 8), np.float32)}, "2 bags were looked up"),
    (of_cores, {"shape": FEWER}, "the table has 50 rows, but the ids were cast for one of 60"),
    (of_cores, {"slots": lambda: jax.tree.map(lambda a: a.astype(jnp.bfloat16), ops.tt_init_slots(ADAM, cores()))},
     "core 0: slot 'mu' must be float32 .*, but is bfloat16"),
    (of_cores, {"step": -1}, "step must be"),
    (of_cores, {"residuals": left}, "the residuals must come from tt_lookup"),
    (ops.tt_core_gradients, {"cores": cores, "shape": SHAPE, "residuals": lambda: left("cores"),
     "gradients": np.ones((3, 8), np.float32)}, "2 bags were looked up"),
    (cached, {"gradients": np.ones((3, 8), np.float32)}, "2 bags were looked up"),
    (cached, {"state": lambda: ops.tt_cache_init(ops.TTCacheConfig(cache_rows=2), SHAPE, ADAM)}, "has 2 rows, .* 4"),
    (cached, {"state": 3}, "the cache must be made with tt_cache_init"),
    (cached, {"residuals": lambda: left("cores")}, "the residuals must come from tt_cached_lookup"),
    (cached, {"step": True}, "step must be"),
    (tt_lookup, {"of": (1, 2)}, "the cores have shapes"),
    (tt_lookup, {"bags": IDS}, "bags must be jrec.Bags"),
    (tt_lookup, {"shape": (60, 8)}, "shape must be a jrec.TTShape"),
    (tt_lookup, {"unique_capacity": -1}, "unique_capacity is -1"),
    (tt_lookup, {"bags": lambda: with_cast(other())}, "the table has 60 rows"),
]  # fmt: skip


@IMPLEMENTATIONS
@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, arguments, message, implementation):
    with pytest.raises(ValueError, match=message):
        call(**{n: a() if callable(a) else a for n, a in arguments.items()}, implementation=implementation)


@pytest.mark.parametrize("step", [-1, 0.5, True, np.bool_(True), np.float32(2), np.int64(-4), 2**31, "1", None,
                                  np.array([3]), np.array(-3), np.array(0.5), np.array([1, 2])])  # fmt: skip
def test_a_step_is_an_integer_from_zero_on(step):
    with pytest.raises(ValueError, match="step must be how many steps were taken before, an integer from 0 on, but is"):
        apply(step=step, implementation="xla")
    if isinstance(step, np.ndarray) and step.dtype == np.int64:
        with pytest.raises(ValueError, match="step must be"):
            apply(step=jnp.asarray(step), implementation="xla")
    elif isinstance(step, np.ndarray):
        with pytest.raises(ValueError, match="step must be"):
            jax.eval_shape(lambda traced: apply(step=traced), jnp.asarray(step))


def test_steps_of_any_integer_type_are_the_same_step():
    expected = apply(step=4, implementation="xla")
    for step in (np.int64(4), np.array(4), jnp.int32(4)):
        jax.tree.map(np.testing.assert_array_equal, apply(step=step, implementation="xla"), expected)
    traced = jax.jit(lambda step: apply(step=step, implementation="xla"))(jnp.int32(4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), traced, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda one, **o: ops.lookup({"t": one(TABLE)}, {"t": jax.tree.map(one, BAGS)}, **o)[0],
        lambda one, **o: apply(
            table=one(TABLE), slots={n: one(TABLE) for n in ADAM.slots}, gradients=one(GRADIENTS),
            residuals=jax.tree.map(one, left()), **o,
        ),
        lambda one, **o: rows(table=one(TABLE), at=one(AT), gradients=one(GRADIENTS), **o),
        lambda one, **o: ops.squared_gradient_norm(jax.tree.map(one, left()), {"t": one(GRADIENTS)}, **o),
        lambda one, **o: [ops.embedding_bag(one(TABLE), one(IDS), combiner=c, **o) for c in ("sum", "mean", "max")],
        lambda one, **o: ops.gather_reduce(
            one(TABLE), one(IDS.ravel()), one(np.array([0, 2, 4], np.int32)), weights=one(np.ones(4, np.float32)), **o
        ),
        lambda one, **o: ops.tt_embedding_bag(jax.tree.map(one, cores()), SHAPE, one(IDS), **o),
        lambda one, **o: ops.tt_cached_lookup(
            jax.tree.map(one, cores()), jax.tree.map(one, cache()), SHAPE, jax.tree.map(one, BAGS), **o
        )[0],
    ],
)  # fmt: skip
@IMPLEMENTATIONS
def test_numpys_arrays_are_taken_as_jaxs(call, implementation):
    jax.tree.map(
        np.testing.assert_array_equal,
        call(np.asarray, implementation=implementation),
        call(jnp.asarray, implementation=implementation),
    )
    assert np.all(TABLE == 1), "the caller's table was changed"


def step_of(ids, table, slots, gradients, step):
    _, residuals = ops.lookup({"t": table}, {"t": jrec.Bags(ids=ids)}, implementation="xla")
    return apply(
        table=table, slots=slots, gradients=gradients, residuals=residuals, step=step, implementation="xla"
    )  # fmt: skip


def test_mismatches_are_found_while_tracing():
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (IDS, TABLE)]
    slots = dict.fromkeys(ADAM.slots, abstract[1])
    for bags in (2, 3):
        arguments = *abstract, slots, jax.ShapeDtypeStruct((bags, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        if bags == 3:
            with pytest.raises(ValueError, match="2 bags were looked up"):
                jax.eval_shape(step_of, *arguments)
        else:
            assert jax.eval_shape(step_of, *arguments)[0]["t"].shape == (5, 4)


def test_residuals_cross_jit_and_shard_map_with_what_they_know():
    """The two phases in programs of their own; two devices with bags and tables of their own."""
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    two = [np.concatenate([one, one]) for one in (IDS, TABLE, GRADIENTS)]

    def phases(wrap):
        first = wrap(lambda table, ids: ops.lookup({"t": table}, {"t": jrec.Bags(ids=ids)}, implementation="xla")[1])
        second = wrap(
            lambda table, slots, left, gradients: apply(
                table=table, slots=slots, residuals=left, gradients=gradients, implementation="xla"
            )[0]["t"]
        )
        return first, second

    def sharded(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d")))

    def once(function):
        def squeezed(*arguments):  # each device's scalars have an axis outside
            arguments = jax.tree.map(lambda a: a.reshape(a.shape[1:]) if a.shape == (1,) else a, arguments)
            return jax.tree.map(lambda a: a.reshape(1) if a.shape == () else a, function(*arguments))

        return sharded(squeezed)

    expected = apply(implementation="xla")[0]["t"]
    for wrap, arguments, copies in ((jax.jit, (IDS, TABLE, GRADIENTS), 1), (once, two, 2)):
        first, second = phases(wrap)
        ids, table, gradients = arguments
        residuals = first(table, ids)
        assert (residuals["t"].cast.num_rows, residuals["t"].cast.num_bags) == (5, 2)
        new = second(table, ADAM.init(jnp.asarray(table)), residuals, gradients)
        np.testing.assert_allclose(new, np.concatenate([expected] * copies), rtol=1e-6)
        with pytest.raises(ValueError, match="2 bags were looked up"):
            second(table, ADAM.init(jnp.asarray(table)), residuals, np.concatenate([gradients, gradients]))


def test_residuals_are_exported_with_what_they_know():
    def first(table, ids):
        return ops.lookup({"t": table}, {"t": jrec.Bags(ids=ids)}, implementation="xla")[1]

    exported = jax.export.export(jax.jit(first))(TABLE, IDS)
    residuals = jax.export.deserialize(exported.serialize()).call(TABLE, IDS)
    assert jax.tree.structure(residuals) == jax.tree.structure(left())


def test_a_loaders_cast_is_completed_by_the_lookup():
    of_loader = dataclasses.replace(jax.tree.map(np.asarray, left()["t"].cast), num_rows=None, num_bags=None)
    _, residuals = lookup(bags=dataclasses.replace(BAGS, cast=of_loader))
    assert jax.tree.structure(residuals) == jax.tree.structure(left())
    with pytest.raises(ValueError, match="2 bags were looked up"):
        apply(residuals=residuals, gradients=THREE)
