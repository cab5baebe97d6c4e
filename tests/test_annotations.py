"""Annotated shapes and dtypes of the public operations hold for what they take and give."""

import importlib
import inspect
import typing

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jrec import ops
from jrec.ops import Bags

DOORS = {name: door for name, door in vars(ops).items() if inspect.isfunction(door)}
ROWS, DIM, BAGS = 40, 8, 12
OPTIMIZER = ops.Adagrad(learning_rate=0.1)
KEY = jax.random.key_data(jax.random.key(3, impl="threefry2x32"))


def checked(name):
    """A public operation that raises TypeCheckError where its annotations do not hold."""
    return jaxtyping.jaxtyped(inspect.unwrap(DOORS[name]), typechecker=beartype.beartype)


def bare(hint):
    """Whether an annotation has an array without its shape."""
    if hint is jax.Array:
        return True
    is_array = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return not is_array and any(map(bare, typing.get_args(hint)))


@pytest.mark.parametrize("name", [name for name in DOORS if name not in ("tt_init", "tt_svd", "checked_ids")])
def test_every_array_of_a_public_operation_has_a_shape(name):
    hints = typing.get_type_hints(DOORS[name])
    assert hints
    assert not [argument for argument, hint in hints.items() if bare(hint)]


def bags_of(rng, kind):
    weights = None
    if kind == "ragged":
        ids = rng.integers(0, ROWS, 50)
        offsets = jnp.asarray([0, *np.sort(rng.integers(0, 50, BAGS))], jnp.int32)
    else:
        ids, offsets = rng.integers(-1, ROWS, (BAGS, 5)), None
    if kind == "weighted":
        weights = jnp.asarray(rng.normal(size=ids.shape), jnp.float32)
    return Bags(ids=jnp.asarray(ids, jnp.int32), offsets=offsets, weights=weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["ragged", "padded", "weighted"])
def test_lookups_and_updates(kind, dtype):
    rng = np.random.default_rng(0)
    table, bags = jnp.asarray(rng.normal(size=(ROWS, DIM)), dtype), bags_of(rng, kind)
    arguments = table, bags.ids, bags.offsets
    pooled = checked("gather_reduce")(*arguments, weights=bags.weights)
    checked("embedding_bag")(*arguments, weights=bags.weights, combiner="mean")
    cast = checked("tensor_cast")(bags.ids, bags.offsets, num_rows=ROWS)
    slots, rounding = OPTIMIZER.init(table), {"rounding_key": KEY, "rounding_rows": cast.rows + 7}
    step = {"step": jnp.int32(3), "gradient_scale": 0.5, **rounding}
    new, slots = checked("casted_update")(OPTIMIZER, table, slots, cast, pooled, weights=bags.weights, **step)
    rows = jnp.ones((cast.rows.shape[0], DIM))
    checked("row_update")(OPTIMIZER, new, slots, cast.rows, rows, **step)
    tables = {"a": table, "b": new[:, :4]}
    both = {"a": bags, "b": bags}
    activations, residuals = checked("lookup")(tables, both)
    checked("rows_left_out")(residuals)
    checked("squared_gradient_norm")(residuals, activations)
    slots = checked("init_slots")(OPTIMIZER, tables)
    checked("apply_gradients")(OPTIMIZER, tables, slots, residuals, activations, rounding_key=KEY)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("shape", [(6,), (6, 2), (2, 3, 4), (2, 3, 4, 5)])
def test_forms_of_ids(shape, array):
    table, tt_shape = jnp.ones((ROWS, DIM)), ops.TTShape.search(ROWS, DIM, ranks=3)
    ids, weights = array(np.zeros(shape, np.uint16)), array(np.ones(shape, np.float32))
    checked("embedding_bag")(table, ids, weights=weights)
    checked("tt_embedding_bag")(ops.tt_init(tt_shape, jax.random.key(0)), tt_shape, ids, weights=weights)


@pytest.mark.parametrize("kind", ["ragged", "padded", "weighted"])
def test_tensor_trains(kind):
    rng, shape = np.random.default_rng(0), ops.TTShape.search(ROWS, DIM, ranks=3)
    cores, bags = checked("tt_init")(shape, jax.random.key(0)), bags_of(rng, kind)
    checked("tt_embedding_bag")(cores, shape, bags.ids, bags.offsets, weights=bags.weights)
    pooled, residuals = checked("tt_lookup")(cores, shape, bags)
    slots = checked("tt_init_slots")(OPTIMIZER, cores)
    checked("tt_core_gradients")(cores, shape, residuals, pooled)
    checked("tt_apply_gradients")(OPTIMIZER, cores, slots, shape, residuals, pooled, step=2, rounding_key=KEY)
    config = ops.TTCacheConfig(cache_rows=4, warmup_steps=1, refresh_every=1)
    cache = checked("tt_cache_init")(config, shape, OPTIMIZER)
    pooled, residuals = checked("tt_cached_lookup")(cores, cache, shape, bags)
    arguments = OPTIMIZER, cores, slots, cache, shape, residuals, pooled
    cores, slots, cache = checked("tt_cached_apply_gradients")(*arguments, step=1)
    cast = ops.tensor_cast(bags.ids, bags.offsets, num_rows=ROWS)
    checked("tt_cache_step")(config, OPTIMIZER, cores, cache, shape, cast, step=jnp.int32(1))


def test_what_the_annotations_do_not_allow_is_found():
    table = jnp.ones((ROWS, DIM))
    with pytest.raises(jaxtyping.TypeCheckError):
        checked("gather_reduce")(table[0], jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(jaxtyping.TypeCheckError):
        checked("gather_reduce")(table, jnp.zeros((3, 2), jnp.int32), weights=jnp.ones((4, 2)))


def test_a_result_of_another_shape_is_found(monkeypatch):
    module = importlib.import_module("jrec.ops.gather_reduce")
    monkeypatch.setattr(module, "gather_reduce_together", lambda *_: [jnp.ones((3, DIM), jnp.bfloat16)])
    with pytest.raises(jaxtyping.TypeCheckError):
        checked("gather_reduce")(jnp.ones((ROWS, DIM)), jnp.zeros((3, 2), jnp.int32))
