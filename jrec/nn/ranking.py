"""Exact retrieval over all rows of a table: ranks of targets, the k best, and the metrics that papers report.

Scores are products of queries and rows, computed a block of rows at a time, so that memory does not grow with the
table; on a mesh each device has a share of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jrec.mesh.route import AXIS

BLOCK = 8_192


def ranks(
    queries: jax.Array | np.ndarray,
    rows: jax.Array | np.ndarray,
    targets: jax.Array | np.ndarray,
    *,
    left_out: jax.Array | np.ndarray | None = None,
    block: int = BLOCK,
    mesh: Mesh | None = None,
) -> np.ndarray:
    """How many other rows score at least as high as each query's target, among all rows: 0 where it is the best.

    A tie counts against the target, so that a model that scores all rows alike finds nothing. A target is never left
    out itself. Scores are float32; rows whose scores differ by a rounding error may change places.

    Args:
      queries: (n, dim) floats.
      rows: (items, dim) floats.
      targets: (n,) integers, numbers of rows.
      left_out: (n, length) integers, rows that a query leaves out, such as its history; negative ones are absent.
      block: Rows that are scored at once: (n, block) float32.
      mesh: Devices that share the rows; None for one.

    Returns:
      (n,) int32.

    Raises:
      ValueError: If shapes do not fit, a target is no row, or a score is NaN.
    """
    queries, rows, left_out = _checked(queries, rows, left_out, block)
    targets = np.asarray(targets)
    if targets.shape != queries.shape[:1] or not np.issubdtype(targets.dtype, np.integer):
        raise ValueError(
            f"targets must be integers for {len(queries)} queries, but are {targets.dtype}{list(targets.shape)}"
        )
    if targets.size and not (targets.min() >= 0 and targets.max() < len(rows)):
        raise ValueError(f"target {targets.min() if targets.min() < 0 else targets.max()} is none of {len(rows)} rows")
    own = jnp.sum(queries * rows[targets], axis=1)
    if bool(jnp.isnan(own).any()):
        raise ValueError(f"the score of query {int(jnp.isnan(own).argmax())} and its target is NaN")
    better = _over_rows(mesh, _count_above, queries, rows, left_out, block, own, jnp.asarray(targets, jnp.int32))
    return np.asarray(better)


def top_k(
    queries: jax.Array | np.ndarray,
    rows: jax.Array | np.ndarray,
    k: int,
    *,
    left_out: jax.Array | np.ndarray | None = None,
    block: int = BLOCK,
    mesh: Mesh | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k rows of the highest scores of each query, the best first; of equal scores the lowest number first.

    Args:
      queries, rows, left_out, block, mesh: As in ``ranks``.
      k: How many.

    Returns:
      Scores, (n, k) float32, and numbers of rows, (n, k) int32; -inf and -1 where fewer than k are left.

    Raises:
      ValueError: If shapes do not fit, or k is not between 1 and the number of rows.
    """
    queries, rows, left_out = _checked(queries, rows, left_out, block)
    if not 1 <= k <= len(rows):
        raise ValueError(f"k={k} must be between 1 and the {len(rows)} rows")
    scores, numbers = _over_rows(mesh, _best_of(k), queries, rows, left_out, block)
    return np.asarray(scores), np.asarray(numbers)


def ranking_metrics(ranks: np.ndarray, at: Sequence[int] = (10,)) -> dict[str, float]:
    """What ``ranks`` comes to, for queries of one target each, where HR@k and recall@k are the same.

    Args:
      ranks: (n,) integers from 0.
      at: The k of each metric.

    Returns:
      "hr@k", the share of targets among the k best; "ndcg@k", the mean of 1 / log2(2 + rank) of these, 0 of others; and
      "mrr", the mean of 1 / (1 + rank).

    Raises:
      ValueError: If there are no ranks, or one is negative.
    """
    ranks = np.asarray(ranks, np.float64)
    if ranks.size == 0 or ranks.min() < 0:
        raise ValueError(
            f"ranks must be integers from 0, one a query, but are {ranks.size} from {ranks.min(initial=0)}"
        )
    metrics = {}
    for k in at:
        among = ranks < k
        metrics[f"hr@{k}"] = float(among.mean())
        metrics[f"ndcg@{k}"] = float(np.where(among, 1 / np.log2(2 + ranks), 0).mean())
    return {**metrics, "mrr": float((1 / (1 + ranks)).mean())}


def _checked(queries, rows, left_out, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, rows = jnp.asarray(queries, jnp.float32), jnp.asarray(rows, jnp.float32)
    if queries.ndim != 2 or rows.ndim != 2 or queries.shape[1] != rows.shape[1] or len(rows) == 0:
        raise ValueError(f"queries {queries.shape} and rows {rows.shape} must be (n, dim) and (items, dim) of one dim")
    left_out = jnp.full((len(queries), 0), -1, jnp.int32) if left_out is None else jnp.asarray(left_out)
    if left_out.ndim != 2 or len(left_out) != len(queries) or not jnp.issubdtype(left_out.dtype, jnp.integer):
        raise ValueError(
            f"left_out must be integers of shape ({len(queries)}, length), but is {left_out.dtype}{left_out.shape}"
        )
    if block < 1:
        raise ValueError(f"block={block} must be at least 1")
    return queries, rows, left_out.astype(jnp.int32)


def _over_rows(mesh: Mesh | None, work, queries, rows, left_out, block, *further):
    """``work`` on blocks of the rows, by all devices of the mesh."""
    devices = np.array(jax.devices()[:1]) if mesh is None else mesh.devices.reshape(-1)
    block = min(block, -(-len(rows) // len(devices)))
    return _on_devices(rows, queries, left_out, *further, work=work, mesh=Mesh(devices, (AXIS,)), block=block)


@functools.partial(jax.jit, static_argnames=("work", "mesh", "block"))
def _on_devices(rows, queries, left_out, *further, work, mesh: Mesh, block: int):
    # Whole blocks for each device; rows that only pad have numbers past the items and score -inf.
    missing = -len(rows) % (block * mesh.size)
    blocks = jnp.pad(rows, ((0, missing), (0, 0))).reshape(-1, block, rows.shape[1])
    everywhere = PartitionSpec()
    run = jax.shard_map(
        functools.partial(work, len(rows)),
        mesh=mesh,
        in_specs=(PartitionSpec(AXIS), everywhere, everywhere, *[everywhere] * len(further)),
        out_specs=everywhere,
        check_vma=False,
    )
    return run(blocks, queries, left_out, *further)


def _scores(items: int, queries: jax.Array, left_out: jax.Array, block: jax.Array, first: jax.Array):
    """Scores of a block's rows, (n, block), -inf for those that are left out or no rows; and the rows' numbers."""
    numbers = first + jnp.arange(block.shape[0], dtype=jnp.int32)
    # A rank counts rows that score higher: with products in a lower precision, near ties would change it.
    scores = jnp.matmul(queries, block.T, precision="highest")
    scores = jnp.where(numbers[None, :] < items, scores, -jnp.inf)
    # A row that is left out may lie in any block: in the others it gets a place past the end, which is dropped.
    place = jnp.where((left_out >= first) & (left_out < first + block.shape[0]), left_out - first, block.shape[0])
    return scores.at[jnp.arange(len(queries))[:, None], place].set(-jnp.inf, mode="drop"), numbers


def _firsts(blocks: jax.Array) -> jax.Array:
    """The number of the first row of each of the device's blocks."""
    number = jax.lax.axis_index(AXIS) * blocks.shape[0] + jnp.arange(blocks.shape[0], dtype=jnp.int32)
    return number * jnp.int32(blocks.shape[1])


def _count_above(items, blocks, queries, left_out, own, targets):
    def step(count, block_and_first):
        scores, numbers = _scores(items, queries, left_out, *block_and_first)
        # Ties count against the target: a model that scores all items alike must not rank it first.
        above = (scores >= own[:, None]) & (numbers[None, :] != targets[:, None]) & (scores > -jnp.inf)
        return count + jnp.sum(above, axis=1, dtype=jnp.int32), None

    count, _ = jax.lax.scan(step, jnp.zeros(len(queries), jnp.int32), (blocks, _firsts(blocks)))
    return jax.lax.psum(count, AXIS)


@functools.cache  # one function a k, so that its program is compiled once
def _best_of(k: int):
    return functools.partial(_best, k)


def _best(k, items, blocks, queries, left_out):
    def merged(scores, numbers):
        best, place = jax.lax.top_k(scores, k)
        return best, jnp.where(best > -jnp.inf, jnp.take_along_axis(numbers, place, axis=1), -1)

    def step(carry, block_and_first):
        scores, numbers = _scores(items, queries, left_out, *block_and_first)
        numbers = jnp.broadcast_to(numbers, scores.shape)
        # Those before come first: of equal scores ``top_k`` takes the first, which is the lowest number.
        return merged(jnp.concatenate([carry[0], scores], axis=1), jnp.concatenate([carry[1], numbers], axis=1)), None

    nothing = jnp.full((len(queries), k), -jnp.inf), jnp.full((len(queries), k), -1, jnp.int32)
    (scores, numbers), _ = jax.lax.scan(step, nothing, (blocks, _firsts(blocks)))
    # Devices hold ascending ranges of rows, and are gathered in
    # their order: equal scores stay in the order of the rows.
    gathered = [jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (scores, numbers)]
    return merged(*gathered)
