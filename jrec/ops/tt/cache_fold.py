"""Folding learned rows back into the cores: a ridge least-squares step for one core after the other.

TT-Rec discards what an evicted row learned, because following a matrix with its decomposition is hard. This is less: a
correction of the slices that the evicted rows choose. A row is linear in the slice ``G`` it takes from core ``k``,
``row = L G S`` with ``L`` (A, R) the product of the slices before and ``S`` (R', B) the product of the slices after.
With all other cores fixed, the correction ``X`` of a slice minimizes

    sum over its evicted rows e  |L_e X S_e - d_e|^2  +  ridge * sum over ALL its rows r  |L_r X S_r|^2

where ``d_e`` is what the row learned beyond its reconstruction. The second sum needs no visit to the rows: over all
digits of the other cores, the sums of ``L_r^T L_r`` and of ``S_r S_r^T`` are chains of Gram matrices ``H_L``, ``H_S``,
and the sum is ``tr(H_L X H_S X^T)``. With ``Y = chol(H_L)^T X chol(H_S)`` it is ``|Y|^2``, and the problem is a ridge
regression of identity penalty for each slice, solved by conjugate gradients.

A correction is taken only where it lowers its objective. So, with ``E`` the evicted rows' squared error before and
after: ``E`` never grows, and a sweep over ``d`` cores moves all rows of the table together by a squared distance of at
most ``d * (E_before - E_after) / ridge`` (for each core ``(E_(k-1) - E_k) / ridge``, then Cauchy-Schwarz over the
cores). Both up to float32 rounding, and up to the cores' own where they are bfloat16.

Of 1,013 random rows of a 10,131,227 x 16 table of rank 32, far from their reconstruction, ridges of 0.1, 0.01 and 0.001
take away 5, 43 and 98 % of the squared error; the mean squared move of any row of the table is then 0.003, 0.2 and 3 %
of an evicted row's squared error. Nothing is free: a fold pays where evicted rows are looked up that much more often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation
from jrec.ops.tt.index import Level
from jrec.ops.tt.init import Cores
from jrec.ops.tt.products import expand, expand_transpose
from jrec.ops.tt.shape import TTShape

_JITTER = 1e-6  # of a Gram matrix's mean eigenvalue: cores with unused ranks have singular ones
_TINY = 1e-30


def fold_rows(
    cores: Cores,
    shape: TTShape,
    ids: jax.Array,
    rows: jax.Array,
    *,
    ridge: float,
    iterations: int = 8,
    implementation: Implementation | None = None,
) -> Cores:
    """Moves the cores so that they come closer to these rows, and moves other rows little; see the module.

    Args:
      cores: float32 or bfloat16.
      shape: The table's shape.
      ids: (n,) int32, unique, padding behind all others; padding holds ``shape.rows``.
      rows: (n, dim) float32, what the rows should be.
      ridge: What a change of any row of the table costs, in units of an evicted row's error. The ratio of their
        lookups' frequencies is a good one.
      iterations: Iterations of conjugate gradients for each core. Fewer move the cores less; the bounds hold for any
        number.
      implementation: The implementation of grouped products.

    Returns:
      The new cores, of their dtypes. Slices that no id chooses keep their bits.
    """
    n = ids.shape[0]
    real = ids < shape.rows
    levels = _levels(shape, ids, real)
    wide = [core.astype(jnp.float32) for core in cores]
    suffixes = _suffixes(wide, levels, implementation)
    right_grams = _grams([core.swapaxes(1, 3) for core in reversed(wide)])[::-1]
    left, left_gram, out = jnp.ones((n, 1, 1), jnp.float32), jnp.ones((1, 1), jnp.float32), []
    for k, level in enumerate(levels):
        correction = _correction(
            _SliceMap(
                left=left,
                right=suffixes[k],
                core=wide[k],
                level=level,
                real=real,
                implementation=implementation,
            ),
            rows,
            left_gram,
            right_grams[k],
            ridge=ridge,
            iterations=iterations,
        )
        folded = jnp.where(correction != 0, wide[k] + correction, wide[k]).astype(cores[k].dtype)
        out.append(folded)
        core = folded.astype(jnp.float32)  # the next core's correction makes up for this one's rounding
        left = expand(left, core, level, method="grouped", implementation=implementation)
        left_gram = _next_gram(left_gram, core)
    return tuple(out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SliceMap:
    """The linear map from a core to the rows that take one slice each, and its transpose.

    Attributes:
      left: (n, A, R) float32, the products of the cores before.
      right: (n, B, R') float32, the products of the cores after.
      core: (m, R, n_k, R') float32, as it is.
      level: The slice of each row.
      real: (n,) bool, false for padding.
      implementation: The implementation of grouped products.
    """

    left: jax.Array
    right: jax.Array
    core: jax.Array
    level: Level
    real: jax.Array
    implementation: Implementation | None

    def rows(self, core: jax.Array) -> jax.Array:
        """(n, dim) float32; zero for padding."""
        middle = expand(self.left, core, self.level, method="grouped", implementation=self.implementation)
        rows = jnp.einsum("eas,ebs->eab", middle, self.right, preferred_element_type=jnp.float32)
        return jnp.where(self.real[:, None], rows.reshape(rows.shape[0], -1), jnp.float32(0))

    def transpose(self, rows: jax.Array) -> jax.Array:
        """Of the core's shape, from (n, dim) rows."""
        split = rows.reshape(rows.shape[0], -1, self.right.shape[1])
        gradient = jnp.einsum("eab,ebs->eas", split, self.right, preferred_element_type=jnp.float32)
        return expand_transpose(
            gradient,
            self.left,
            self.core,
            self.level,
            below_count=self.level.count,
            method="grouped",
            implementation=self.implementation,
        )[1]


def _correction(
    rows_of: _SliceMap,
    targets: jax.Array,
    left_gram: jax.Array,
    right_gram: jax.Array,
    *,
    ridge: float,
    iterations: int,
) -> jax.Array:
    """What to add to the core; zero for slices whose objective it would not lower."""
    before_left = jnp.linalg.inv(_factor(left_gram)).T  # X = C_L^-T Y C_S^-1
    before_right = jnp.linalg.inv(_factor(right_gram))

    def of_whitened(y: jax.Array) -> jax.Array:
        return jnp.einsum("ra,manb,bs->mrns", before_left, y, before_right)

    def to_whitened(x: jax.Array) -> jax.Array:
        return jnp.einsum("ra,mrns,bs->manb", before_left, x, before_right)

    learned = jnp.where(rows_of.real[:, None], targets, jnp.float32(0))
    learned = learned - rows_of.rows(rows_of.core)
    solution = _conjugate_gradients(
        lambda y: to_whitened(rows_of.transpose(rows_of.rows(of_whitened(y)))) + jnp.float32(ridge) * y,
        to_whitened(rows_of.transpose(learned)),
        iterations,
    )
    correction = of_whitened(solution)
    left_over = learned - rows_of.rows(correction)

    def of_slices(errors: jax.Array) -> jax.Array:
        sums = jnp.zeros(rows_of.core.shape[0], jnp.float32)
        return sums.at[rows_of.level.digits].add(jnp.sum(jnp.square(errors), axis=1), mode="drop")

    lowered = of_slices(left_over) + jnp.float32(ridge) * _norms(solution, solution) < of_slices(learned)
    return jnp.where(lowered[:, None, None, None], correction, jnp.float32(0))


def _conjugate_gradients(system: Callable[[jax.Array], jax.Array], constant: jax.Array, iterations: int) -> jax.Array:
    """Solves ``system(y) = constant``, from zero, for every slice on its own: (m, R, n, R')."""

    def step(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        y, residual, direction, square = state
        image = system(direction)
        length = _ratio(square, _norms(direction, image))[:, None, None, None]
        y, residual = y + length * direction, residual - length * image
        following = _norms(residual, residual)
        direction = residual + _ratio(following, square)[:, None, None, None] * direction
        return y, residual, direction, following

    start = (jnp.zeros_like(constant), constant, constant, _norms(constant, constant))
    return jax.lax.fori_loop(0, iterations, step, start)[0]


def _norms(a: jax.Array, b: jax.Array) -> jax.Array:
    """Inner products of slices, (m,)."""
    return jnp.sum(a * b, axis=(1, 2, 3))


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, jnp.float32(1)), jnp.float32(0))


def _factor(gram: jax.Array) -> jax.Array:
    """Lower Cholesky factor, of a matrix made positive by a little more penalty."""
    size = gram.shape[0]
    extra = jnp.float32(_JITTER / size) * jnp.trace(gram) + jnp.float32(_TINY)
    return jnp.linalg.cholesky(gram + extra * jnp.eye(size, dtype=jnp.float32))


def _levels(shape: TTShape, ids: jax.Array, real: jax.Array) -> list[Level]:
    """For each core which slice every row takes; each row is its own parent."""
    n, rest, levels = ids.shape[0], ids, []
    parents = jnp.where(real, jnp.arange(n, dtype=jnp.int32), jnp.int32(n))
    for factor in reversed(shape.row_factors):
        digits = jnp.where(real, rest % jnp.int32(factor), jnp.int32(factor))
        levels.append(Level(parents=parents, digits=digits, count=jnp.sum(real, dtype=jnp.int32)))
        rest = rest // jnp.int32(factor)
    return levels[::-1]


def _suffixes(cores: list[jax.Array], levels: list[Level], implementation: Implementation | None) -> list[jax.Array]:
    """For each core the product of the slices after it, (n, B, R') float32, dims in a row's order."""
    n = levels[0].capacity
    suffix, out = jnp.ones((n, 1, 1), jnp.float32), []
    for core, level in zip(reversed(cores), reversed(levels), strict=True):
        out.append(suffix)
        _, left, dims, _ = core.shape
        product = expand(suffix, core.swapaxes(1, 3), level, method="grouped", implementation=implementation)
        suffix = product.reshape(n, suffix.shape[1], dims, left).swapaxes(1, 2).reshape(n, -1, left)
    return out[::-1]


def _grams(cores: list[jax.Array]) -> list[jax.Array]:
    """For each core the Gram matrix of the products of all slices of the cores before it."""
    gram, out = jnp.ones((1, 1), jnp.float32), []
    for core in cores:
        out.append(gram)
        gram = _next_gram(gram, core)
    return out


def _next_gram(gram: jax.Array, core: jax.Array) -> jax.Array:
    """Sum over digits and dims of ``G^T gram G``, (R', R') float32, of an (m, R, n, R') core."""
    return jnp.einsum("irns,rq,iqnt->st", core, gram, core, preferred_element_type=jnp.float32)
