"""Row optimizers on register tiles: what a kernel is compiled for, and the mathematics that its step may use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp

from jrec.pallas.tile import Tile
from jrec.row_optimizers import Exact, RowOptimizer, Slots, SlotShape, taken_before

NUMBERS = 4  # of ``hyperparameters`` of every optimizer; further ones are an exact optimizer's
State = Slots  # by name: values, or row scalars for a row slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The part of a row optimizer that a kernel is compiled for.

    Attributes:
      optimizer: The optimizer without its learning rate, which a kernel takes as a number.
      dim: Elements of a row that count in a mean: fewer than the storage's where rows are padded.
    """

    optimizer: RowOptimizer
    dim: int

    @property
    def slots(self) -> tuple[tuple[str, SlotShape], ...]:
        """The slots' names and shapes."""
        return tuple(self.optimizer.slots.items())

    def access(self, itemsize: int) -> int:
        """The bytes of an element by which tiles are chosen, where the table's has ``itemsize``.

        The sums of an exact optimizer take a thread the registers of the rows again: with eight elements of 16 bits a
        thread they would not fit.
        """
        return max(itemsize, 4) if self.optimizer.has_tail else itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """``jrec.row_optimizers.StepMath`` on a tile: the geometry, the primitives, and the numbers of one step.

    Attributes:
      tile: The geometry.
      ops: ``inline`` or ``twins``.
      dim: See ``Rule``.
      learning_rate: Row scalars.
      gradient_scale: Row scalars.
      factors: Row scalars, one over each of the optimizer's ``bias_corrections``.
      number: From its place to row scalars, an entry of ``hyperparameters``.
    """

    tile: Tile
    ops: ModuleType
    dim: int
    learning_rate: jax.Array
    gradient_scale: jax.Array
    factors: tuple[jax.Array, jax.Array]
    number: Callable[[int | jax.Array], jax.Array]

    sqrt = staticmethod(jnp.sqrt)
    rsqrt = staticmethod(jax.lax.rsqrt)

    @property
    def taken(self) -> jax.Array:
        """How many steps were taken (``StepMath``)."""
        return self.number(NUMBERS)

    def tail(self, number: int | jax.Array, *, after: bool = False) -> jax.Array:
        """See ``StepMath``; read where it is used: all of them at once would take a thread's registers."""
        return self.number(NUMBERS + 1 + 2 * number + int(after))

    def power(self, base: float, exponents: jax.Array, /) -> jax.Array:
        """A base to the power of exponents (``StepMath``)."""
        if base == 0:
            return jnp.where(exponents != 0, 0 * exponents, jnp.float32(1))  # NaN, after too many steps, stays NaN
        return jnp.exp(exponents * jnp.float32(math.log(base)))

    def rounded(self, x: jax.Array, /) -> jax.Array:
        """``x``: a GPU's bits are its own."""
        return x

    def summed(self, term: Callable[[int | jax.Array], jax.Array], count: int, /) -> jax.Array:
        """See ``StepMath``; a loop, so that numbers of all terms do not take registers at once."""
        return jax.lax.fori_loop(1, count, lambda j, total: total + term(j), term(0))

    def spread(self, scalars: jax.Array) -> jax.Array:
        """Row scalars as values."""
        return self.ops.spread(self.tile, scalars)

    def where(self, condition: jax.Array, x: jax.Array, y: float, /) -> jax.Array:
        """``x`` where ``condition``, else ``y``."""
        return jnp.where(condition, x, jnp.float32(y))

    def clipped(self, values: jax.Array, norm: float) -> jax.Array:
        """Rows scaled down to Euclidean norm ``norm`` where theirs is greater."""
        norms = jnp.sqrt(self.ops.row_sum(self.tile, values * values))
        return values * self.spread(jnp.where(norms > norm, norm / norms, jnp.float32(1)))

    def row_mean(self, values: jax.Array) -> jax.Array:
        """Means along rows as row scalars."""
        # By ``dim``, not the tile's width: padding columns are zeros and do not count.
        return self.ops.row_sum(self.tile, values) * jnp.float32(1 / self.dim)

    def unbiased(self, values: jax.Array, moment: int) -> jax.Array:
        """See ``StepMath``; a product, since a division takes a kernel several times as long."""
        return values * self.spread(self.factors[moment])


def rule_of(optimizer: RowOptimizer, dim: int) -> Rule:
    """The rule of a row optimizer.

    Raises:
      NotImplementedError: For one whose step is not given by ``slot_terms`` and ``row_change``.
    """
    if not (optimizer.has_terms or isinstance(optimizer, Exact)):
        raise NotImplementedError(
            f"{type(optimizer).__name__} has a step_rows of its own, which runs in no Pallas kernel; define slot_terms"
            " and row_change, or use implementation='xla' or None"
        )
    if optimizer.takes_schedule:
        # Static, and compared: two runs that differ in the rate alone share a compiled kernel.
        optimizer = dataclasses.replace(optimizer, learning_rate=0.0)
    return Rule(optimizer=optimizer, dim=dim)


def hyperparameters(optimizer: RowOptimizer, step: jax.Array, gradient_scale: jax.Array) -> jax.Array:
    """What a kernel needs of a step, float32.

    (4,): learning rate, gradient scale, one over the bias corrections. Of an exact optimizer further how many steps
    were taken before, and each of its ``tail_numbers`` before the step and after it; filled up to a multiple of 4,
    since compilers join loads of neighbours into one of 16 bytes.
    """
    corrections = optimizer.bias_corrections((step + 1).astype(jnp.float32))
    factors = [1 / jnp.asarray(correction, jnp.float32) for correction in corrections]
    numbers = jnp.stack([optimizer.learning_rate_at(step), gradient_scale, *factors])
    if not isinstance(optimizer, Exact):
        return numbers
    tails = jnp.stack([optimizer.tail_numbers(step), optimizer.tail_numbers(step + 1)], axis=1).reshape(-1)
    joined = jnp.concatenate([numbers, taken_before(step)[None], tails])
    return jnp.pad(joined, (0, -joined.shape[0] % 4))
