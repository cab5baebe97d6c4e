"""Row optimizers as optax transformations, for trees of parameters in which some leaves are a ``jrec.Table``.

    tx = jrec.optax.partition(rows=jrec.optax.rowwise_adagrad(0.05), dense=optax.adam(1e-3))
    state = tx.init(params)
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    params = jrec.optax.apply_updates(params, updates)

A step touches only the rows that were looked up. It writes them where they are, so that the update of a table is not a
difference, but its new rows (``NewRows``), and only ``apply_updates`` of this module, or ``jrec.nn.Optimizer``, takes
it: no transformation may follow a row optimizer. Weight decay and clipping by row are the row optimizers' own, learning
rates may be schedules, and ``clip_by_global_norm`` of this module clips all gradients together. What optax makes of
parameters (``optax.ema``, ``optax.MultiSteps``, ``optax.add_decayed_weights``) would be as large as the table; JAX or
``Table`` refuse it, so give them only the dense parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jrec.ops.rounding import derived_key
from jrec.ops.table import Table, is_row_gradients, is_table, row_step
from jrec.row_optimizers import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    RMSProp,
    RowOptimizer,
    RowWiseAdagrad,
    RowWiseAdam,
    RowWiseRMSProp,
    Schedule,
    Slots,
)

_ROUNDING = 0x726F756E  # "roun", as of ``jrec.nn.SparseOptimizer``


class RowState(NamedTuple):
    """The state of a row optimizer.

    Attributes:
      count: () int32, steps taken.
      slots: In the place of each table its slots by name, (rows, dim) or (rows,) float32.
    """

    count: jax.Array
    slots: PyTree


class RowOptions(TypedDict, total=False):
    """``weight_decay`` and ``max_row_norm``, which every row optimizer takes; see ``jrec.ops.RowOptimizer``."""

    weight_decay: float
    max_row_norm: float | None


class MomentumOptions(RowOptions, total=False):
    """``RowOptions``, ``momentum`` and ``nesterov``; see ``jrec.ops.Momentum``."""

    momentum: float
    nesterov: bool


class AdagradOptions(RowOptions, total=False):
    """``RowOptions``, ``eps`` and ``initial_accumulator``; see ``jrec.ops.Adagrad``."""

    eps: float
    initial_accumulator: float


class RMSPropOptions(RowOptions, total=False):
    """``RowOptions``, ``decay`` and ``eps``; see ``jrec.ops.RMSProp``."""

    decay: float
    eps: float


class AdamOptions(RowOptions, total=False):
    """``RowOptions``, ``b1``, ``b2`` and ``eps``; see ``jrec.ops.Adam``."""

    b1: float
    b2: float
    eps: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewRows:
    """The update of a table: the table after the step, which ``apply_updates`` puts in its place."""

    table: Table | Tracer


def rows(optimizer: RowOptimizer, *, rounding_seed: int | None = None) -> optax.GradientTransformation:
    """A row optimizer as a transformation of trees whose leaves are all tables (``partition`` for others).

    Args:
      optimizer: The optimizer, as ``jrec.ops.Adam(learning_rate=optax.warmup_constant_schedule(0, 0.01, 100))``.
      rounding_seed: Rounds 16-bit rows stochastically, with other bits at every step; None rounds to nearest.

    Raises:
      TypeError: In ``init`` and ``update``, if a leaf is no table, or its gradient no ``RowGradients``.
    """

    def init(params: PyTree) -> RowState:
        def slots(path: jax.tree_util.KeyPath, table: Table | Tracer) -> Slots:
            if not is_table(table):
                raise TypeError(
                    f"params{jax.tree_util.keystr(path)} is {jax.typeof(table)}, but row optimizers step only"
                    " jrec.Table; give both kinds of parameters to jrec.optax.partition"
                )
            return optimizer.init(jax.ShapeDtypeStruct(table.shape, table.dtype))  # pyright: ignore[reportArgumentType]

        return RowState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(slots, params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, RowState]:
        if params is None:
            raise ValueError("row optimizers step tables where they are: give update(gradients, state, params)")
        tables, structure = jax.tree.flatten(params)
        of_tables, slots = structure.flatten_up_to(updates), structure.flatten_up_to(state.slots)
        key = None
        if rounding_seed is not None:
            seed = jax.random.key_data(jax.random.key(rounding_seed, impl="threefry2x32"))
            key = derived_key(derived_key(seed, _ROUNDING), state.count)
        stepped = []
        for number, (table, own, of_table) in enumerate(zip(tables, slots, of_tables, strict=True)):
            if not is_row_gradients(of_table):
                raise TypeError(f"the gradient of {jax.typeof(table)} is {jax.typeof(of_table)}, no jrec.RowGradients")
            own_key = derived_key(key, number) if key is not None and table.dtype.itemsize < 4 else None
            table, new = row_step(optimizer, table, own, of_table, step=state.count, rounding_key=own_key)
            # In the tree that the slots came in: Flax has mappings of its own for them.
            stepped.append((table, jax.tree.structure(own).unflatten([new[name] for name in sorted(new)])))
        new_rows = structure.unflatten([NewRows(table) for table, _ in stepped])
        return new_rows, RowState(state.count + 1, structure.unflatten([own for _, own in stepped]))

    return optax.GradientTransformation(init, update)


def sgd(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[RowOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.SGD``, whose other hyperparameters are ``options``."""
    return rows(SGD(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def momentum(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[MomentumOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.Momentum``, as ``sgd``."""
    return rows(Momentum(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def adagrad(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[AdagradOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.Adagrad``, as ``sgd``."""
    return rows(Adagrad(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def rowwise_adagrad(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[AdagradOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.RowWiseAdagrad``, as ``sgd``."""
    return rows(RowWiseAdagrad(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def rmsprop(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[RMSPropOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.RMSProp``, as ``sgd``."""
    return rows(RMSProp(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def adam(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[AdamOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.Adam``, as ``sgd``."""
    return rows(Adam(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def rowwise_rmsprop(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[RMSPropOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.RowWiseRMSProp``, as ``sgd``."""
    return rows(RowWiseRMSProp(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def rowwise_adam(
    learning_rate: float | Schedule, *, rounding_seed: int | None = None, **options: Unpack[AdamOptions]
) -> optax.GradientTransformation:
    """``rows`` of ``jrec.ops.RowWiseAdam``, as ``sgd``."""
    return rows(RowWiseAdam(learning_rate=learning_rate, **options), rounding_seed=rounding_seed)


def frozen() -> optax.GradientTransformation:
    """Leaves tables as they are; ``optax.set_to_zero`` is for arrays."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del updates
        return jax.tree.map(NewRows, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def partition(
    *, rows: optax.GradientTransformation, dense: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for all tables of a tree and one for its other leaves (``optax.partition`` by ``labels``).

    Args:
      rows: For tables, such as ``rowwise_adagrad(0.05)``.
      dense: For arrays, any of optax.
    """
    return optax.partition({"rows": rows, "dense": dense}, labels)


def labels(tree: PyTree) -> PyTree:
    """``"rows"`` for each table or row gradient of a tree, ``"dense"`` for each other leaf."""
    return jax.tree.map(lambda leaf: "rows" if is_table(leaf) or is_row_gradients(leaf) else "dense", tree)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` of arrays and row gradients together; comes before the optimizers.

    A row's gradient is the sum over its lookups, as in an ordinary gradient of the table.

    Args:
      max_norm: The greatest norm, to which gradients of a greater one are scaled down.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        # Each table's lookups are sorted here, once for the norm and for the step.
        gradients = jax.tree.map(lambda leaf: leaf.casted() if is_row_gradients(leaf) else leaf, updates)
        norm = global_norm(gradients)
        scale = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda leaf: leaf * scale.astype(_dtype(leaf)), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: PyTree) -> jax.Array:
    """() float32: the Euclidean norm of arrays and row gradients together, as ``optax.tree.norm`` of arrays."""
    squares = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        squares += leaf.squared_norm() if is_row_gradients(leaf) else jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return jnp.sqrt(squares)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``optax.apply_updates``, and for tables their new rows.

    Args:
      params: Parameters.
      updates: What a transformation's ``update`` returned for them.
    """
    plain: Callable[[PyTree, PyTree], PyTree] = optax.apply_updates
    return jax.tree.map(
        lambda leaf, update: update.table if isinstance(update, NewRows) else plain(leaf, update),
        params,
        updates,
        is_leaf=lambda leaf: leaf is None,
    )


def _dtype(leaf: jax.Array) -> DTypeLike:
    return jnp.float32 if is_row_gradients(leaf) else leaf.dtype
