"""The primitive of embedding training: rows of a source, summed per segment (Tensor Casting, Figures 2 and 7).

Forward it sums table rows into bags; backward, with a cast's arguments, bag gradients into unique rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree

from jrec.ops.arrays import Bagged, Ids, Offsets, Table, Weights
from jrec.ops.dispatch import Call, Implementation, dispatch_together
from jrec.ops.doors import array, checked_table
from jrec.ops.explicit_axes import auto_inside, like_bags
from jrec.ops.gather_reduce_xla import run_in_xla
from jrec.ops.gather_reduce_xla import segment_of_entries as segment_of_entries
from jrec.ops.gather_reduce_xla import take_rows as take_rows
from jrec.ops.offsets import check_concrete_offsets
from jrec.ops.undivided import undivided
from jrec.ops.verdicts import KernelClass

_Arguments = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]  # source, indices, offsets, weights
GatherCall = Call[_Arguments, jax.Array]
"""What ``gather_reduce_call`` makes."""


@auto_inside(lambda source, indices, offsets=None, **_: like_bags(indices, offsets, source))
def gather_reduce(
    source: Table,
    indices: Ids,
    offsets: Offsets | None = None,
    *,
    weights: Weights | None = None,
    implementation: Implementation | None = None,
) -> Bagged:
    """Sums (weighted) rows of ``source`` per segment: ``out[s] = sum_j weights[j] * source[indices[j]]``.

    Differentiable in ``source`` and ``weights``, as ``embedding_bag``.

    Args:
      source: (rows, dim), float32, bfloat16 or float16.
      indices: int32, (num_segments, length) or, with ``offsets``, (capacity,). Negative entries are skipped; an entry
        past the source makes its segment NaN, never another row's sum. Entries past ``offsets[-1]`` are not read.
      offsets: (num_segments + 1,) int32, ascending from 0 and at most ``capacity``; None for padded segments. Inside
        jit, segments whose offsets descend, are negative or too large are NaN.
      weights: float32 of the shape of ``indices``, or None for ones.
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest.

    Returns:
      (num_segments, dim) float32, accumulated in float32; empty segments are zero.

    Raises:
      ValueError: On shapes or dtypes that do not fit together, or, outside jit, malformed offsets.
    """
    call = gather_reduce_call(source, indices, offsets, weights=weights)
    return gather_reduce_together([call], implementation)[0]


def lookup_of_table(
    table: jax.Array,
    ids: jax.Array,
    offsets: jax.Array | None = None,
    *,
    weights: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``gather_reduce`` of a table, which a GPU's kernel refuses where ``jit`` divides it over devices."""
    call = gather_reduce_call(table, ids, offsets, weights=weights)
    return gather_reduce_together([call], implementation, tables=True)[0]


def gather_reduce_call(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None = None, *, weights: jax.Array | None = None
) -> GatherCall:
    """One of several for ``gather_reduce_together``; see ``gather_reduce`` for arguments and errors."""
    check_segments(indices, offsets, weights, name="indices")
    source = checked_table(source, "source")
    return _call(source, indices, offsets, weights)


def gather_reduce_together(
    calls: Sequence[GatherCall], implementation: Implementation | None, *, tables: bool = False
) -> list[jax.Array]:
    """What ``gather_reduce`` returns for each call; on a GPU, kernels of all of them share launches.

    Args:
      calls: Made by ``gather_reduce_call``.
      implementation: As for ``gather_reduce``.
      tables: Whether the sources are tables; a GPU's kernel refuses those that ``jit`` divides over devices.
    """
    return _reduced((implementation, tables), [call.args for call in calls])


_Static = tuple[Implementation | None, bool]  # the implementation, and whether sources are tables


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(static: _Static, several: list[_Arguments]) -> list[jax.Array]:
    implementation, tables = static
    calls = [_call(*args, table=tables) for args in several]
    return dispatch_together("gather_reduce", implementation, calls, _together)


@functools.partial(_reduced.defjvp, symbolic_zeros=True)
def _reduced_jvp(
    static: _Static, primals: tuple[list[_Arguments]], tangents: PyTree
) -> tuple[list[jax.Array], list[jax.Array]]:
    from jrec.ops.bag_sums import BagSums  # which is made of this module's function

    (several,), (changes,) = primals, tangents
    sums: list[jax.Array] = _reduced(static, several)
    of_sums = []
    for args, change, out in zip(several, changes, sums, strict=True):
        source, _, offsets, weights = args
        bags = BagSums.of(source, offsets, weights, static[0])
        of_table, _, _, of_weights = (None if isinstance(x, SymbolicZero) else x for x in change)
        tangent = bags.tangent(args, of_table, of_weights)
        of_sums.append(jnp.zeros_like(out) if tangent is None else tangent)
    return sums, of_sums


def _call(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None, *, table: bool = False
) -> GatherCall:
    return Call(
        args=(source, indices, offsets, weights),
        xla=run_in_xla,
        native=_native if source.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) else None,
        request=_of_table if table else _request,
        kernel=KernelClass(kernel="gather_reduce", dtype=source.dtype.name, dim=source.shape[1]),
    )


def check_segments(
    indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None, *, name: str = "ids"
) -> None:
    """Raises ValueError where indices, offsets and weights are neither padded nor ragged segments.

    Outside jit also where the offsets do not ascend from 0 to at most the number of indices.
    """
    expected = "(num_bags, length)" if offsets is None else "(capacity,) beside offsets"
    for argument, values in ((name, indices), ("offsets", offsets), ("weights", weights)):
        if values is not None:
            array(argument, values, "an array")
    if indices.ndim != (2 if offsets is None else 1):
        one_id = f"give offsets, or {name}[:, None] for one id a bag"
        remedy = "flatten them, or leave the offsets out" if offsets is not None else one_id
        if offsets is None and indices.ndim != 1:
            remedy = f"reshape them, such as by {name}.reshape(-1, length)"
        raise ValueError(f"{name} must have shape {expected}, but have shape {indices.shape}; {remedy}")
    if indices.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, but are {indices.dtype}; convert them by jrec.checked_ids")
    if offsets is not None and (offsets.ndim != 1 or offsets.shape[0] < 1 or offsets.dtype != jnp.int32):
        raise ValueError(f"offsets must be (num_bags + 1,) int32, but are {offsets.dtype}{list(offsets.shape)}")
    if weights is not None and (weights.shape != indices.shape or weights.dtype != jnp.float32):
        raise ValueError(
            f"weights must be float32 of the {name}' shape {indices.shape},"
            f" but are {weights.dtype}{list(weights.shape)}"
        )
    if offsets is not None:
        check_concrete_offsets(offsets, indices.shape[0], name=name)


def _native(source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None) -> jax.Array:
    from jrec.native import xla as native

    return native.gather_reduce(source, indices, offsets, weights)


def _request(source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None) -> _Arguments:
    return source, indices, offsets, weights


def _of_table(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> _Arguments:
    return undivided(source), indices, offsets, weights


def _together(requests: Sequence[_Arguments]) -> list[jax.Array]:
    from jrec.pallas.closed import closed
    from jrec.pallas.gather_reduce import Request, gather_reduce_many

    def run(requests: Sequence[_Arguments]) -> list[jax.Array]:
        return gather_reduce_many(
            [
                Request(source=source, indices=indices, offsets=offsets, weights=weights)
                for source, indices, offsets, weights in requests
            ]
        )

    return closed(run, list(requests))
