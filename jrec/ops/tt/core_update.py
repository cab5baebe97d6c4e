"""One optimizer step of a core, which to a row optimizer is a table whose rows are its slices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jrec.ops import rounding
from jrec.ops.arrays import Slots
from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.doors import CORES, about, checked, checked_optimizer, checked_slots
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.row_update import has_native, row_update
from jrec.ops.tt.contract import TTResiduals, backward_levels, factor
from jrec.ops.tt.index import Level, TTIndex, index_implementation
from jrec.ops.tt.init import Cores
from jrec.ops.tt.products import Method, expand_transpose, native_level
from jrec.ops.tt.shape import TTShape

_Stepped = tuple[jax.Array, Slots]  # a core and its slots after a step


def tt_init_slots(optimizer: RowOptimizer, cores: Cores) -> tuple[Slots, ...]:
    """Fresh slots for every core, whose slices are the optimizer's rows."""
    checked_optimizer(optimizer)
    sizes = "m", "R", "n", "R'"
    return tuple(optimizer.init(_as_table(checked(f"core {k}", c, sizes, CORES))) for k, c in enumerate(cores))


def checked_core_slots(optimizer: RowOptimizer, cores: Cores, slots: tuple[Slots, ...]) -> tuple[Slots, ...]:
    """The cores' slots.

    Raises:
      ValueError: If they are not such as ``tt_init_slots`` makes.
    """
    if not isinstance(slots, Sequence) or len(slots) != len(cores):
        raise ValueError(f"there must be slots of each of the {len(cores)} cores; make them with tt_init_slots")
    checked_cores = []
    for k, (core, of_core) in enumerate(zip(cores, slots, strict=True)):
        with about(f"core {k}"):
            checked_cores.append(checked_slots(optimizer, jax.eval_shape(_as_table, core), of_core))
    return tuple(checked_cores)


def _as_table(core: jax.Array) -> jax.Array:
    return core.reshape(core.shape[0], -1)


def core_keys(key: jax.Array | None, cores: Cores) -> tuple[jax.Array | None, ...]:
    """The rounding key of every core, None for those that are not rounded."""
    if key is None:
        return (None,) * len(cores)
    rounding.check_key(key)
    return tuple(rounding.derived_key(key, k) if core.dtype.itemsize < 4 else None for k, core in enumerate(cores))


def step_cores(
    optimizer: RowOptimizer,
    cores: Cores,
    slots: tuple[Slots, ...],
    shape: TTShape,
    residuals: TTResiduals,
    row_gradients: jax.Array,
    *,
    method: Method,
    step: jax.Array,
    gradient_scale: jax.Array,
    rounding_keys: tuple[jax.Array | None, ...],
    implementation: Implementation | None,
) -> tuple[Cores, tuple[Slots, ...]]:
    """Steps every core as soon as its gradient is there, by the native kernels together with making it.

    Args:
      optimizer: Any row optimizer.
      cores: As in the forward pass.
      slots: The slots of every core.
      shape: The table's shape.
      residuals: From the forward pass.
      row_gradients: (unique_capacity, dim) float32.
      method: As for ``core_gradients``.
      step: () int32.
      gradient_scale: () float32.
      rounding_keys: The key of every core, as from ``core_keys``.
      implementation: "xla", "native", "pallas" or None.

    Returns:
      The new cores and slots.
    """
    levels, new = residuals.index.levels, {}

    def stepped(
        k: int, core: jax.Array, slots: Slots, gradient: jax.Array, step: jax.Array, scale: jax.Array
    ) -> _Stepped:
        touched = touched_slices(residuals.index, k, shape.row_factors[k], implementation)
        options = {"step": step, "gradient_scale": scale, "rounding_key": rounding_keys[k]}
        return step_core(optimizer, core, slots, gradient, touched, **options, implementation=implementation)

    def transpose(
        k: int, gradient: jax.Array, below: jax.Array, below_count: jax.Array, way: Method
    ) -> tuple[jax.Array, _Stepped]:
        def apart(
            gradient: jax.Array,
            below: jax.Array,
            core: jax.Array,
            slots: Slots,
            level: Level,
            below_count: jax.Array,
            step: jax.Array,
            scale: jax.Array,
        ) -> tuple[jax.Array, _Stepped]:
            ways = {"below_count": below_count, "method": way, "implementation": implementation}
            below, of_core = expand_transpose(gradient, below, factor(core, way, implementation), level, **ways)
            return below, stepped(k, core, slots, of_core, step, scale)

        def together(
            gradient: jax.Array,
            below: jax.Array,
            core: jax.Array,
            slots: Slots,
            level: Level,
            below_count: jax.Array,
            step: jax.Array,
            scale: jax.Array,
        ) -> tuple[jax.Array, _Stepped]:
            from jrec.native import tt

            core_level = native_level(core, level, below_count)
            return tt.expand_transpose_step(gradient, below, core_level, optimizer, core, slots, step, scale)

        args = gradient, below, cores[k], slots[k], levels[k - 1], below_count, step, gradient_scale
        # The native kernel steps a slice while its gradient is in the caches; it knows float32 cores and the optimizers
        # of ``jrec.native``. Elsewhere gradient and step are two operations.
        known = way == "grouped" and cores[k].dtype == jnp.float32 and has_native(optimizer, cores[k])
        if implementation in ("xla", "pallas") or not known:
            return apart(*args)
        return dispatch("tt_expand", implementation, args, xla=apart, native=together)

    made = backward_levels(cores, shape, levels, residuals.products, row_gradients, transpose, method=method)
    for k, one in made:
        new[k] = one if k > 0 else stepped(0, cores[0], slots[0], one, step, gradient_scale)
    return tuple(new[k][0] for k in range(len(cores))), tuple(new[k][1] for k in range(len(cores)))


def touched_slices(index: TTIndex, core: int, slices: int, implementation: Implementation | None = None) -> jax.Array:
    """Which slices of a core the batch's ids chose, (m,) bool."""
    level = index.levels[max(core - 1, 0)]

    def xla(chosen: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.zeros(slices, bool).at[chosen].set(True, mode="drop")

    def native(chosen: jax.Array, count: jax.Array) -> jax.Array:
        from jrec.native import tt

        return tt.touched(chosen, count, slices)

    args = level.parents if core == 0 else level.digits, level.count
    return dispatch("tt_touched", index_implementation(implementation), args, xla=xla, native=native)


def step_core(
    optimizer: RowOptimizer,
    core: jax.Array,
    slots: Slots,
    gradient: jax.Array,
    touched: jax.Array,
    *,
    step: jax.Array,
    gradient_scale: jax.Array,
    rounding_key: jax.Array | None,
    implementation: Implementation | None,
) -> tuple[jax.Array, Slots]:
    """Steps the slices of a core that are ``touched`` and leaves the bits of the others.

    Args:
      optimizer: Any row optimizer.
      core: (m, R, n, R').
      slots: The core's slots.
      gradient: float32 of the core's shape.
      touched: (m,) bool.
      step: () int32.
      gradient_scale: () float32.
      rounding_key: (2,) uint32 for cores of 16 bits that are rounded stochastically, or None.
      implementation: "xla", "native" or None.

    Returns:
      The new core and slots.
    """
    m = core.shape[0]

    def xla(
        core: jax.Array,
        slots: Slots,
        gradient: jax.Array,
        touched: jax.Array,
        step: jax.Array,
        scale: jax.Array,
        key: jax.Array | None,
    ) -> _Stepped:
        rows = jnp.nonzero(touched, size=m, fill_value=m)[0].astype(jnp.int32)
        # Touched slices in front, as a row update wants its rows: ascending, padding behind them.
        values = gradient.reshape(m, -1).at[rows].get(mode="fill", fill_value=0)
        scalars = {"step": step, "gradient_scale": scale, "rounding_key": key}
        table, slots = row_update(optimizer, core.reshape(m, -1), slots, rows, values, **scalars, implementation="xla")
        return table.reshape(core.shape), slots

    def native(
        core: jax.Array,
        slots: Slots,
        gradient: jax.Array,
        touched: jax.Array,
        step: jax.Array,
        scale: jax.Array,
        key: jax.Array | None,
    ) -> _Stepped:
        from jrec.native import xla as kernels

        # All rows in their places, untouched ones past the end, and the core as it is: XLA copies what a kernel
        # changes in place after a reshape.
        rows = jnp.where(touched, jnp.arange(m, dtype=jnp.int32), jnp.int32(m))
        return kernels.row_update(optimizer, core, slots, rows, gradient.reshape(m, -1), step, scale, key)

    args = (core, slots, gradient, touched, step, gradient_scale, rounding_key)
    known = native if has_native(optimizer, core) else None
    named: Implementation | None = "xla" if implementation == "pallas" else implementation
    return dispatch("row_update", named, args, xla=xla, native=known)
