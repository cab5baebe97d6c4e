"""Contractions of a tensor-train table: rows from cores, and core gradients from row gradients, level by level."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jrec.ops.dispatch import Implementation
from jrec.ops.gather_reduce import gather_reduce, segment_of_entries
from jrec.ops.offsets import nan_unless, whole_bags
from jrec.ops.sizes import larger, search_sorted, smaller
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.tt.index import Level, TTIndex
from jrec.ops.tt.init import Cores
from jrec.ops.tt.products import Method, expand, expand_transpose
from jrec.ops.tt.shape import TTShape
from jrec.ops.types import array_record


def unique_rows(
    cores: Cores, shape: TTShape, levels: tuple[Level, ...], *, method: Method, implementation: Implementation | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The products of every level: unique prefixes of two cores, of three .., unique rows.

    Args:
      cores: float32 or bfloat16.
      shape: The table's shape.
      levels: The lookup's levels, all or the first ones.
      method: "dense" makes all products of the first two cores as one GEMM; see ``products``.
      implementation: The implementation of grouped products.

    Returns:
      The last level's products, (capacity, dims so far, rank), and the products of the levels before it.
    """
    # Only the products of the first two cores are few enough to make all of them, whether the batch needs them or not.
    below, products = _first(cores, shape), []
    for k, level in enumerate(levels):
        products.append(below)
        way = method if k == 0 else "grouped"
        core = factor(cores[k + 1], way, implementation)
        below = expand(below, core, level, method=way, implementation=implementation)
    return below, tuple(products[1:])


def core_gradients(
    cores: Cores,
    shape: TTShape,
    levels: tuple[Level, ...],
    products: tuple[jax.Array, ...],
    row_gradients: jax.Array,
    *,
    method: Method,
    implementation: Implementation | None,
) -> Cores:
    """The float32 gradient of every core.

    Gradients are aggregated on unique rows beforehand, here on the unique prefixes of every level (EL-Rec, in-advance
    gradient aggregation); each core has a single gradient array.

    Args:
      cores: As in the forward pass.
      shape: The table's shape.
      levels: The lookup's levels.
      products: The products of the levels before the last, from ``unique_rows``.
      row_gradients: (unique_capacity, dim) float32.
      method: "dense" makes both gradients of the first two cores by one GEMM each.
      implementation: The implementation of grouped products.
    """

    def transpose(
        k: int, gradient: jax.Array, below: jax.Array, below_count: jax.Array, way: Method
    ) -> tuple[jax.Array, jax.Array]:
        core = factor(cores[k], way, implementation)
        ways = {"below_count": below_count, "method": way, "implementation": implementation}
        return expand_transpose(gradient, below, core, levels[k - 1], **ways)

    made = backward_levels(cores, shape, levels, products, row_gradients, transpose, method=method)
    return tuple(core for _, core in made)[::-1]


def backward_levels(
    cores: Cores,
    shape: TTShape,
    levels: tuple[Level, ...],
    products: tuple[jax.Array, ...],
    row_gradients: jax.Array,
    transpose: Callable[[int, jax.Array, jax.Array, jax.Array, Method], tuple[jax.Array, PyTree]],
    *,
    method: Method,
) -> Iterator[tuple[int, PyTree]]:
    """What ``transpose`` makes of every core, from the last to the second, and the gradient of the first, numbered.

    Args:
      cores: As in the forward pass; core ``k`` is not read any more once it has come.
      shape: The table's shape.
      levels: As for ``core_gradients``.
      products: As for ``core_gradients``.
      row_gradients: As for ``core_gradients``.
      transpose: From the number of a core, the gradient of its level's products, the products below, how many of these
        are real, and the level's method: the gradient of the products below, and anything.
      method: As for ``core_gradients``.
    """
    # The last core's right rank is 1, so a row is a product with one column.
    gradient = row_gradients[:, :, None]
    lower = (_first(cores, shape), *products)
    counts = (jnp.int32(shape.row_factors[0]), *(level.count for level in levels))
    # TT-Rec's backward pass (Algorithm 2 there) from the last core to the first, but once for each unique prefix in
    # place of each lookup (EL-Rec's in-advance gradient aggregation).
    for k in range(len(levels), 0, -1):
        gradient, of_core = transpose(k, gradient, lower[k - 1], counts[k - 1], method if k == 1 else "grouped")
        # A generator, so that whoever steps core ``k`` may overwrite
        # it now: ``transpose`` has read it for the last time.
        yield k, of_core
    yield 0, gradient.reshape(shape.core_shapes[0])


def naive_rows(cores: Cores, shape: TTShape, ids: jax.Array) -> jax.Array:
    """TT-Rec, Algorithm 1: the product of gathered slices for each id, (n, dim) float32 of (n,) int32 ids.

    Negative ids give zero rows, ids past the table NaN. Differentiable by JAX itself, which makes a core gradient for
    each id and adds them up: the reference, and what the other contractions are measured against.
    """
    rest, digits = ids, []
    for factor in reversed(shape.row_factors):
        # The digits of a row number in the mixed radix of the cores' factors, the last core's first.
        digits.append(rest % jnp.int32(factor))
        rest = rest // jnp.int32(factor)
    out = jnp.ones((ids.shape[0], 1, 1), jnp.float32)
    for core, digit in zip(cores, reversed(digits), strict=True):
        # Widened before the gather, so that the transpose adds up slices' gradients in float32 too.
        slices = core.astype(jnp.float32).at[digit].get(mode="clip")
        out = jnp.einsum("uar,urns->uans", out, slices, preferred_element_type=jnp.float32)
        out = out.reshape(out.shape[0], out.shape[1] * out.shape[2], out.shape[3])
    rows = out.reshape(ids.shape[0], shape.dim)
    # The factors' product may pass the table's rows, so an id past them has slices, too: it is told by its number.
    rows = jnp.where((ids < shape.rows)[:, None], rows, jnp.float32(jnp.nan))
    return jnp.where((ids >= 0)[:, None], rows, jnp.float32(0))


def naive_bag(
    cores: Cores, shape: TTShape, ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    """A summing bag of ``naive_rows``, (num_bags, dim) float32."""
    rows = naive_rows(cores, shape, ids.reshape(-1))
    if weights is not None:
        rows = jnp.where((ids >= 0).reshape(-1, 1), rows * weights.reshape(-1, 1), jnp.float32(0))
    if offsets is None:
        return jnp.sum(rows.reshape(*ids.shape, shape.dim), axis=1)
    segments = segment_of_entries(offsets, ids.shape[0])
    sums = jax.ops.segment_sum(rows, segments, offsets.shape[0] - 1, indices_are_sorted=True, mode="drop")
    return nan_unless(whole_bags(offsets, segments), sums)


def bags_by_shared_prefix(
    below: jax.Array,
    last_core: jax.Array,
    index: TTIndex,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """EL-Rec's sample-level reuse (Equation 5): of a bag's rows with a common prefix, the last slices are summed first.

    Pays where bags hold many rows of few prefixes that other bags do not hold; rows that many bags share are better
    made once.

    Args:
      below: (P, A, R) float32, the level below the last.
      last_core: (m, R, n, 1).
      index: The lookup's index.
      offsets: The bags' offsets, or None.
      weights: The lookups' weights, or None.
      implementation: See ``products``.

    Returns:
      (num_bags, dim) float32.
    """
    m, rank, n, _ = last_core.shape
    level, capacity, whole = index.levels[-1], index.sources.size, None
    if offsets is None:
        num_bags = index.sources.shape[0]
        bags = jnp.arange(capacity, dtype=jnp.int32) // jnp.int32(larger(1, index.sources.shape[1]))
    else:
        num_bags = offsets.shape[0] - 1
        bags = segment_of_entries(offsets, capacity)
        whole = whole_bags(offsets, bags)
    sources = index.sources.reshape(-1)
    # Padding falls behind the last bag, where no sum reads it.
    bags = jnp.where(sources >= 0, bags, jnp.int32(num_bags))
    scales = jnp.ones(capacity, jnp.float32) if weights is None else weights.reshape(-1)
    # The cast has sorted the lookups by row: a stable sort by bag leaves each bag's rows in that order.
    bags = bags[index.cast.positions]
    # Of the cast only its stable sort is wanted: no room for unique bags.
    by_bag = tensor_cast(bags[:, None], num_rows=num_bags, unique_capacity=0, implementation=implementation).positions
    bags, order = bags[by_bag], index.cast.positions[by_bag]
    sources, scales = sources[order], scales[order]
    real = bags < num_bags
    parents = level.parents.at[sources].get(mode="fill", fill_value=below.shape[0], wrap_negative_indices=False)
    # Within a bag rows ascend, and so do their parents: equal (bag,
    # parent) pairs are neighbours, and one scan numbers them.
    changed = (bags[1:] != bags[:-1]) | (parents[1:] != parents[:-1])
    first = real & jnp.concatenate([jnp.ones(smaller(1, capacity), bool), changed])
    pair = jnp.cumsum(first, dtype=jnp.int32) - 1
    place = jnp.where(first, pair, jnp.int32(capacity))
    total = jnp.sum(real, dtype=jnp.int32)

    def of_pairs(values: jax.Array, padding: jax.Array | int) -> jax.Array:
        return jnp.full(capacity, padding, jnp.int32).at[place].set(values, mode="drop")

    bounds = jnp.append(of_pairs(jnp.arange(capacity, dtype=jnp.int32), total), total)
    digits = level.digits.at[sources].get(mode="fill", fill_value=m, wrap_negative_indices=False)
    # Equation 5 turned around: slices that share a prefix are summed before
    # the product, so that there is one product a pair in place of one a row.
    slices = gather_reduce(
        last_core.reshape(m, rank * n), digits, bounds, weights=scales, implementation=implementation
    )
    # A pair past the table has no parent; any real one will do, since its slices' sum is NaN.
    pairs = Level(
        parents=jnp.minimum(of_pairs(parents, 0), jnp.int32(below.shape[0] - 1)),
        digits=jnp.arange(capacity, dtype=jnp.int32),
        count=jnp.sum(first, dtype=jnp.int32),
    )
    products = expand(
        below, slices.reshape(capacity, rank, n, 1), pairs, method="grouped", implementation=implementation
    )
    rows = products.reshape(capacity, below.shape[1] * n)
    pair_bags = of_pairs(bags, num_bags)
    ends = search_sorted(pair_bags, jnp.arange(num_bags + 1, dtype=jnp.int32), "left")
    sums = gather_reduce(rows, jnp.arange(capacity, dtype=jnp.int32), ends, implementation=implementation)
    return sums if whole is None else nan_unless(whole, sums)


def bags_of_products(
    below: jax.Array, last_core: jax.Array, index: TTIndex, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    """The last products fused with pooling, a Pallas kernel: rows are added to their bags and never written.

    Args:
      below: (P, A, R) float32, the level below the last.
      last_core: (m, R, n, 1) float32 or bfloat16.
      index: The lookup's index.
      offsets: The bags' offsets, or None.
      weights: The lookups' weights, or None.

    Returns:
      (num_bags, dim) float32.
    """
    from jrec.pallas import tt

    level = index.levels[-1]
    return tt.bags(below, last_core, level.parents, level.digits, index.sources, offsets, weights)


def factor(core: jax.Array, method: Method, implementation: Implementation | None) -> jax.Array:
    """A core as its products take it: Pallas kernels widen bfloat16 in registers, the others want float32."""
    return core if implementation == "pallas" and method == "grouped" else core.astype(jnp.float32)


def _first(cores: Cores, shape: TTShape) -> jax.Array:
    m, _, n, right = shape.core_shapes[0]
    return cores[0].astype(jnp.float32).reshape(m, n, right)


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class TTResiduals:
    """What a lookup leaves for its backward pass.

    Attributes:
      index: The index work.
      weights: The lookups' weights, normalized, or None.
      products: The products of the levels between the first core and the rows, (capacity, dims so far, rank) float32
        each.
    """

    index: TTIndex
    weights: jax.Array | None
    products: tuple[jax.Array, ...]
