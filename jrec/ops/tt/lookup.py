"""Tensor-train embedding bags in the two phases of ``jrec.ops.lookup``; ``embedding_bag`` has them in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jrec.ops.arrays import Bagged, RoundingKey, Scale, Slots, Step
from jrec.ops.dispatch import IMPLEMENTATIONS, Implementation, native_unavailable
from jrec.ops.doors import CORES, FLOAT32, checked, checked_cast, checked_gradients, checked_scale, checked_step
from jrec.ops.explicit_axes import auto_inside, like, like_bags
from jrec.ops.forms import formed_bags
from jrec.ops.gather_reduce import check_segments, gather_reduce
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.sizes import is_static
from jrec.ops.tt.contract import (
    TTResiduals,
    bags_by_shared_prefix,
    bags_of_products,
    core_gradients,
    unique_rows,
)
from jrec.ops.tt.core_update import checked_core_slots, core_keys, step_cores
from jrec.ops.tt.core_update import tt_init_slots as tt_init_slots
from jrec.ops.tt.cost import CONTRACTIONS, Contraction, TTTraffic, dense_fits, explain, fuses_pooling
from jrec.ops.tt.decompose import check_cores
from jrec.ops.tt.index import TTIndex, tt_index
from jrec.ops.tt.init import Cores
from jrec.ops.tt.products import Method
from jrec.ops.tt.shape import TTShape, check_shape
from jrec.ops.types import Bags, Cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Static arguments of a lookup."""

    shape: TTShape
    contraction: Contraction | None
    traffic: TTTraffic | None
    implementation: Implementation | None
    unique_capacity: int | None = None


@auto_inside(lambda cores, shape, bags, **_: (like_bags(bags.ids, bags.offsets), PartitionSpec()))
def tt_lookup(
    cores: Cores,
    shape: TTShape,
    bags: Bags,
    *,
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    unique_capacity: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Bagged, TTResiduals]:
    """Phase one: pooled rows of every bag, and what their backward pass needs.

    Args:
      cores: As for ``tt_embedding_bag``.
      shape: The table's shape.
      bags: What to look up; a cast made ahead of time, over ``shape.rows`` rows, is used.
      contraction: As for ``tt_embedding_bag``, "naive" excepted.
      traffic: As for ``tt_embedding_bag``.
      unique_capacity: How many unique rows fit; None for as many as there can be. Bags of rows that do not fit are NaN,
        and ``residuals.index.cast.num_unique`` passes the capacity.
      implementation: As for ``tt_embedding_bag``.

    Returns:
      Activations, (num_bags, dim) float32, and residuals for ``tt_core_gradients`` or ``tt_apply_gradients``.

    Raises:
      ValueError: On shapes or dtypes that do not fit, or unknown names.
    """
    bags = formed_bags(bags)
    check_segments(bags.ids, bags.offsets, bags.weights)
    config, cores = checked_lookup(cores, shape, contraction, traffic, implementation)
    _refuse_naive(contraction)
    config = dataclasses.replace(config, unique_capacity=unique_capacity)
    cast = None if bags.cast is None else checked_cast(bags.cast, shape.rows, bags)
    return forward(config, cores, bags.ids, bags.offsets, bags.weights, cast)


@auto_inside(lambda cores, *_, **__: like(tuple(cores)))
def tt_core_gradients(
    cores: Cores,
    shape: TTShape,
    residuals: TTResiduals,
    gradients: Bagged,
    *,
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    implementation: Implementation | None = None,
) -> Cores:
    """Gradients of the cores, for any optax optimizer: ordinary float32 arrays of their shapes.

    Args:
      cores: As given to ``tt_lookup``.
      shape: The table's shape.
      residuals: From ``tt_lookup``.
      gradients: (num_bags, dim) float32, of the activations.
      contraction: As for ``tt_lookup``.
      traffic: As for ``tt_lookup``.
      implementation: As for ``tt_lookup``.

    Raises:
      ValueError: On shapes or dtypes that do not fit, or unknown names.
    """
    config, cores = checked_lookup(cores, shape, contraction, traffic, implementation)
    _refuse_naive(contraction)
    gradients = _checked_gradients(shape, residuals, gradients)

    def run(method: str) -> Callable[..., Cores]:
        way = _way(method)

        def backward(cores: Cores, residuals: TTResiduals, gradients: jax.Array) -> Cores:
            row_gradients = _row_gradients(config, residuals, gradients)
            products, levels = residuals.products, residuals.index.levels
            return core_gradients(
                cores, shape, levels, products, row_gradients, method=way, implementation=implementation
            )

        return backward

    return _by_platform(config, "backward", residuals.index, run, (cores, residuals, gradients))


@auto_inside(lambda optimizer, cores, slots, *_, **__: like((tuple(cores), tuple(slots))))
def tt_apply_gradients(
    optimizer: RowOptimizer,
    cores: Cores,
    slots: tuple[Slots, ...],
    shape: TTShape,
    residuals: TTResiduals,
    gradients: Bagged,
    *,
    step: Step = 0,
    gradient_scale: Scale = 1.0,
    rounding_key: RoundingKey | None = None,
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    implementation: Implementation | None = None,
) -> tuple[Cores, tuple[Slots, ...]]:
    """Phase two with a fused core update: each core is updated as soon as its gradient is there, in place if donated.

    To the optimizer a core is a table whose rows are its slices; those that no id of the batch chose keep their bits.

    Args:
      optimizer: Any row optimizer.
      cores: As given to ``tt_lookup``.
      slots: As ``tt_init_slots`` makes them.
      shape: The table's shape.
      residuals: From ``tt_lookup``.
      gradients: (num_bags, dim) float32, of the activations.
      step: () int32, how many steps were taken before.
      gradient_scale: Multiplies the gradients: one over the loss scale.
      rounding_key: (2,) uint32, a new one for every step: bfloat16 cores are rounded stochastically, core ``k`` with
        ``jrec.ops.rounding.derived_key(rounding_key, k)``. None rounds to nearest; float32 cores are never rounded.
      contraction: As for ``tt_lookup``.
      traffic: As for ``tt_lookup``.
      implementation: As for ``tt_lookup``.

    Returns:
      The new cores and slots.

    Raises:
      ValueError: On shapes, dtypes or slots that do not fit, unknown names, or a rounding key that is not (2,) uint32.
    """
    config, cores = checked_lookup(cores, shape, contraction, traffic, implementation)
    _refuse_naive(contraction)
    gradients = _checked_gradients(shape, residuals, gradients)
    slots = checked_core_slots(optimizer, cores, slots)

    def run(method: str) -> Callable[..., tuple[Cores, tuple[Slots, ...]]]:
        way = _way(method)

        def update(
            cores: Cores,
            residuals: TTResiduals,
            gradients: jax.Array,
            slots: tuple[Slots, ...],
            step: jax.Array,
            scale: jax.Array,
            keys: Sequence[jax.Array | None],
        ):
            row_gradients = _row_gradients(config, residuals, gradients)
            options = {"step": step, "gradient_scale": scale, "rounding_keys": keys, "implementation": implementation}
            return step_cores(optimizer, cores, slots, shape, residuals, row_gradients, method=way, **options)

        return update

    scalars = checked_step(step), checked_scale(gradient_scale), core_keys(rounding_key, cores)
    args = (cores, residuals, gradients, slots, *scalars)
    return _by_platform(config, "backward", residuals.index, run, args)


def forward(
    config: LookupConfig,
    cores: Cores,
    ids: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    cast: Cast | None,
) -> tuple[jax.Array, TTResiduals]:
    """Activations of checked arguments, and what their backward pass needs; ``cast`` was made ahead, or is None."""
    shape, implementation = config.shape, config.implementation
    index = tt_index(
        shape, ids, offsets, cast=cast, unique_capacity=config.unique_capacity, implementation=implementation
    )

    def run(method: str) -> Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]:
        def forward(cores: Cores, index: TTIndex, offsets: jax.Array | None, weights: jax.Array | None):
            if method == "sample":
                below, products = unique_rows(
                    cores, shape, index.levels[:-1], method="grouped", implementation=implementation
                )
                last = cores[-1].astype(jnp.float32)
                out = bags_by_shared_prefix(below, last, index, offsets, weights, implementation=implementation)
                # With two cores ``below`` is the first core itself, which the backward pass has.
                return out, (*products, below) if len(index.levels) > 1 else ()
            if implementation == "pallas" and fuses_pooling(shape, index.sources.size, config.traffic):
                below, products = unique_rows(
                    cores, shape, index.levels[:-1], method=_way(method),
                    implementation=implementation,
                )  # fmt: skip
                out = bags_of_products(below, cores[-1], index, offsets, weights)
                return out, (*products, below) if len(index.levels) > 1 else ()
            rows, products = unique_rows(
                cores, shape, index.levels, method=_way(method),
                implementation=implementation,
            )  # fmt: skip
            rows = rows.reshape(-1, shape.dim)
            return gather_reduce(rows, index.sources, offsets, weights=weights, implementation=implementation), products

        return forward

    out, products = _by_platform(config, "forward", index, run, (cores, index, offsets, weights))
    return out, TTResiduals(index=index, weights=weights, products=products)


def _way(method: str) -> Method:
    """How the first two cores' products are made by a contraction."""
    return "dense" if method == "dense" else "grouped"


def _row_gradients(config: LookupConfig, residuals: TTResiduals, gradients: jax.Array) -> jax.Array:
    cast, weights = residuals.index.cast, residuals.weights
    return casted_gather_reduce(cast, gradients, weights, implementation=config.implementation)


def _by_platform[Result](
    config: LookupConfig,
    which: Literal["forward", "backward"],
    index: TTIndex,
    run: Callable[[str], Callable[..., Result]],
    args: tuple[PyTree, ...],
) -> Result:
    """Runs the contraction that is named, or the one chosen for the platform that the program is lowered for."""
    if config.contraction is not None:
        return run(config.contraction)(*args)
    lookups = index.sources.size
    # An exported program of any batch size: without a size there is nothing to estimate.
    if not is_static(lookups):
        return run("unique")(*args)

    def chosen(platform: Literal["cpu", "gpu"], native: bool) -> str:
        bags = index.cast.num_bags
        choice = explain(config.shape, lookups, bags=bags, platform=platform, native=native, traffic=config.traffic)
        name = choice.forward if which == "forward" else choice.backward
        return "unique" if name == "naive" else name  # what no id repeats, "unique" makes as often, with less memory

    if config.implementation == "native":
        return run(chosen("cpu", True))(*args)
    if config.implementation == "pallas":  # its kernels were asked for, so XLA's dense GEMM is not chosen for them
        return run("unique")(*args)
    native = config.implementation is None and native_unavailable() is None
    cpu, gpu = chosen("cpu", native), chosen("gpu", False)
    if cpu == gpu:
        return run(cpu)(*args)
    # Traced once, lowered perhaps for another platform than this process has: the choice is left to the lowering.
    return jax.lax.platform_dependent(*args, cpu=run(cpu), default=run(gpu))


def checked_lookup(
    cores: Cores,
    shape: TTShape,
    contraction: Contraction | None,
    traffic: TTTraffic | None,
    implementation: Implementation | None,
) -> tuple[LookupConfig, Cores]:
    """The static arguments, and the cores as JAX's arrays."""
    check_shape(shape)
    check_cores(cores, shape)
    cores = tuple(checked(f"core {k}", core, core.shape, CORES) for k, core in enumerate(cores))
    if contraction is not None and contraction not in CONTRACTIONS:
        raise ValueError(f"contraction {contraction!r} is unknown; choose None or one of {', '.join(CONTRACTIONS)}")
    if contraction == "dense" and shape.num_cores == 2:
        raise ValueError("two cores have no prefix product, so contraction 'dense' does not apply; use 'unique'")
    if contraction == "dense" and not dense_fits(shape):
        raise ValueError(
            f"the dense product of cores of {shape.row_factors[0]} and {shape.row_factors[1]} slices has more rows than"
            " int32 numbers; use contraction 'unique'"
        )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation={implementation!r} is unknown; choose None or one of {names}")
    config = LookupConfig(shape=shape, contraction=contraction, traffic=traffic, implementation=implementation)
    return config, cores


def _refuse_naive(contraction: Contraction | None) -> None:
    if contraction == "naive":
        raise ValueError("contraction 'naive' exists only in tt_embedding_bag; use 'unique' or None here")


def _checked_gradients(shape: TTShape, residuals: TTResiduals, gradients: jax.Array) -> jax.Array:
    """The gradients, (num_bags, dim) float32, for residuals of a lookup in a table of this shape.

    Raises:
      ValueError: If one of them is something else.
    """
    if not isinstance(residuals, TTResiduals):
        raise ValueError(f"the residuals must come from tt_lookup, but are of type {type(residuals).__name__}")
    return checked_gradients(gradients, checked_cast(residuals.index.cast, shape.rows), shape.dim, FLOAT32)
