"""Softmax over all rows of a table, a block of rows at a time: neither pass holds the (queries, rows) scores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jrec.mesh.route import AXIS
from jrec.nn.losses import all_examples
from jrec.ops.varying import varying_like

BLOCK = 1_024
"""Rows that are scored at once: 25,600 positions, a batch of 128 histories of 200, then take 105 MB of scores."""


def full_softmax(
    queries: jax.Array,
    positives: jax.Array,
    rows: jax.Array,
    *,
    positive_ids: jax.Array,
    row_ids: jax.Array | None = None,
    temperature: float = 1.0,
    block: int = BLOCK,
) -> jax.Array:
    """Cross entropy of each query's own row against all rows, exactly, in memory of (queries, block) scores.

    The backward pass computes the scores of each block again. Every row gets a gradient, so that of a whole table it is
    as large as the table.

    In a step on a mesh each device has queries of its own and a share of the rows (vocabulary parallelism, Shoeybi et
    al. 2019, arXiv 1909.08053, section 3): it scores its rows for the queries of all devices, and only queries and
    their sums travel. The losses are the same as on one device.

    Args:
      queries: (n, dim) floats, such as users, or positions of histories.
      positives: (n, dim) floats, the row that each query should find.
      rows: (m, dim) floats, such as float32 or bfloat16; sums are float32.
      positive_ids: (n,) integers, the numbers of the positives among the rows. That row counts by ``positives`` only,
        and need not be among ``rows``.
      row_ids: (m,) integers, the numbers of the rows, each once; rows of negative ones are absent. None where the rows
        are numbered from 0, on a mesh in the order of its devices.
      temperature: What scores are divided by.
      block: Rows that are scored at once.

    Returns:
      (n,) float32.

    Raises:
      ValueError: If shapes do not fit, there are no rows, or ``block`` is not at least 1.
      ConfigError: As ``all_examples``.

    Example:
      >>> table, targets = jnp.eye(3), jnp.arange(3)
      >>> full_softmax(jnp.eye(3), table[targets], table, positive_ids=targets).round(3)  # 1 against 0 and 0
      Array([0.551, 0.551, 0.551], dtype=float32)
    """
    if queries.shape != positives.shape or queries.ndim != 2 or rows.ndim != 2 or rows.shape[1] != queries.shape[1]:
        raise ValueError(
            f"queries {queries.shape}, positives {positives.shape} and rows {rows.shape} must be (n, dim), (n, dim) and"
            " (m, dim) of one dim"
        )
    if block < 1 or not len(rows):
        raise ValueError(f"{block=} and the {len(rows)} rows must be at least 1")
    if row_ids is None:
        row_ids = jnp.arange(len(rows), dtype=jnp.int32) + _first_row(len(rows))
    if positive_ids.shape != queries.shape[:1] or row_ids.shape != rows.shape[:1]:
        raise ValueError(
            f"positive_ids {positive_ids.shape} and row_ids {row_ids.shape} must be integers, one for each of"
            f" {len(queries)} queries and {len(rows)} rows"
        )
    scaled, row_ids = queries.astype(jnp.float32) / temperature, jnp.asarray(row_ids)
    own = jnp.sum(scaled * positives.astype(jnp.float32), axis=1)
    sums: jax.Array = _log_sum_exp(
        min(block, len(rows)), all_examples(scaled), rows, all_examples(positive_ids).astype(row_ids.dtype), row_ids
    )
    return jax.nn.logsumexp(jnp.concatenate([own[None], _of_own_queries(sums, len(queries))]), axis=0) - own


def _first_row(rows: int) -> jax.Array:
    """The number of a device's first row where each has ``rows``, () int32."""
    try:
        return jax.lax.axis_index(AXIS).astype(jnp.int32) * jnp.int32(rows)
    except NameError:
        return jnp.int32(0)


def _of_own_queries(sums: jax.Array, queries: int) -> jax.Array:
    """(devices, queries): what each device's rows come to for this device's queries, of (devices * queries,)."""
    if len(sums) > queries:
        sums = jax.lax.all_to_all(sums, AXIS, split_axis=0, concat_axis=0, tiled=True)
    return sums.reshape(-1, queries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_sum_exp(block: int, queries: jax.Array, rows: jax.Array, own: jax.Array, ids: jax.Array) -> jax.Array:
    """The logarithm of each query's sum of exponentials of its scores; -inf where no row counts.

    Args:
      block: Rows that are scored at once, at most ``m``.
      queries: (n, dim) float32.
      rows: (m, dim) floats.
      own: (n,) integers, the row that does not count for a query.
      ids: (m,) integers of that dtype, the rows' numbers; rows of negative ones do not count.

    Returns:
      (n,) float32.
    """

    def step(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        top, total = carry
        _, _, scores = _scores(block, queries, rows, own, ids, number)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        # Where no row has counted yet the highest score is -inf, which must not be taken off itself.
        shift = jnp.where(highest == -jnp.inf, 0, highest)
        # A running sum of exponentials (Milakov and Gimelshein 2018): what came before is rescaled to the new highest
        # score.
        total = total * jnp.exp(top - shift) + jnp.sum(jnp.exp(scores - shift[:, None]), axis=1)
        return (highest, total), None

    start = jnp.full(len(queries), -jnp.inf, jnp.float32), jnp.zeros(len(queries), jnp.float32)
    (top, total), _ = jax.lax.scan(step, varying_like(start, (queries, rows)), _numbers(block, rows))
    return jnp.log(total) + top


def _forward(
    block: int, queries: jax.Array, rows: jax.Array, own: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    sums: jax.Array = _log_sum_exp(block, queries, rows, own, ids)
    return sums, (queries, rows, own, ids, sums)


def _backward(
    block: int, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    queries, rows, own, ids, sums = residuals
    shift = jnp.where(sums == -jnp.inf, 0, sums)

    def step(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        of_queries, of_rows = carry
        start, part, scores = _scores(block, queries, rows, own, ids, number)
        # The softmax itself, since ``sums`` are logarithms of the whole sums; zero where a row does not count.
        shares = jnp.exp(scores - shift[:, None]) * gradient[:, None]
        # A row is of one block, where the gradients of all queries meet in float32: it is rounded once.
        before = jax.lax.dynamic_slice_in_dim(of_rows, start, block)
        part_gradient = before + jnp.matmul(shares.T, queries).astype(rows.dtype)
        of_rows = jax.lax.dynamic_update_slice_in_dim(of_rows, part_gradient, start, 0)
        return (of_queries + jnp.matmul(shares, part), of_rows), None

    zeros = jnp.zeros_like(queries), jnp.zeros_like(rows)
    gradients, _ = jax.lax.scan(step, varying_like(zeros, (queries, rows)), _numbers(block, rows))
    return (*gradients, None, None)


_log_sum_exp.defvjp(_forward, _backward)


def _numbers(block: int, rows: jax.Array) -> jax.Array:
    return jnp.arange(-(-len(rows) // block), dtype=jnp.int32)


def _scores(
    block: int, queries: jax.Array, rows: jax.Array, own: jax.Array, ids: jax.Array, number: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A block's first row, its rows in float32, and their scores, (n, block), -inf for rows that do not count."""
    # The last block reaches back, so that no table is copied to
    # pad it: the rows that the block before had do not count again.
    start = jnp.minimum(number * block, len(rows) - block)
    part = jax.lax.dynamic_slice_in_dim(rows, start, block).astype(jnp.float32)
    numbers = jax.lax.dynamic_slice_in_dim(ids, start, block)
    counts = (numbers >= 0) & (start + jnp.arange(block, dtype=jnp.int32) >= number * block)
    counts = counts[None, :] & (numbers[None, :] != own[:, None])
    return start, part, jnp.where(counts, jnp.matmul(queries, part.T), -jnp.inf)
