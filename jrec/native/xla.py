"""The native kernels inside jit on CPU: XLA custom calls on the program's own buffers, tables and slots in place.

Each operand and result stays where XLA put it; scratch is a result of its own, so that XLA plans its memory. Under
``vmap`` the calls run one after another.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jrec.native.calls import custom_call, threads_attribute, without_derivative
from jrec.native.hyper import hyperparameters, kind_of
from jrec.native.partition import lookup_plan, partitioned, update_plan, update_rule
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.types import Cast

_ENTRIES_PER_CHUNK = 16384  # of a cast: each chunk costs a scan of its 2,048 counters per pass


@functools.cache
def unavailable() -> str | None:
    """Why the native kernels cannot run inside jit here, or None where they can. Quick: compiles nothing."""
    if sys.platform == "win32" or sys.maxsize < 2**32:
        return "they need a 64-bit POSIX system"
    try:
        from llvmlite import binding

        from jrec.native import ffi
    except ImportError as error:
        return f"numba cannot be imported: {error}"
    version = _api_version()
    if version is None:
        return "this jaxlib comes without xla/ffi/api/c_api.h, so its FFI version is unknown"
    if version[0] != ffi.API_MAJOR or version[1] < ffi.API_MINOR:
        return f"this jaxlib speaks FFI version {version[0]}.{version[1]}, they {ffi.API_MAJOR}.{ffi.API_MINOR}"
    triple = binding.get_process_triple()
    if triple.startswith(("x86_64", "amd64")) and not binding.get_host_cpu_features().get("f16c", False):
        return "this x86 CPU has no F16C instructions"
    return None


def _api_version() -> tuple[int, int] | None:
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return (int(versions["MAJOR"]), int(versions["MINOR"])) if len(versions) == 2 else None


def gather_reduce(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    """See ``jrec.ops.gather_reduce``."""
    padded, weighted = offsets is None, weights is not None

    def run(source: jax.Array, indices: jax.Array, offsets: jax.Array, weights: jax.Array) -> jax.Array:
        from jrec.native import segment_kernels as kernels

        dim = source.shape[1]
        segments, longest = indices.shape if padded else (offsets.shape[0] - 1, indices.shape[0])
        chunks, pieces = _split(indices.size, segments, longest, kernels.GATHER_COST)
        results = [_f32(segments, dim), _f32(pieces, dim), _i32(chunks if pieces else 0)]
        operands = source, indices, offsets, weights
        return custom_call("handlers", "gather_reduce", results)(*operands, threads=threads_attribute())[0]

    ids, out = ("b l", "b d") if padded else ("c", "s d")
    # Shardy's rule: rows and columns of the source, bags and columns of the sums; offsets stay whole on every device.
    rule = f"r d, {ids}, o, {ids if weighted else 'w'} -> {out}"
    call = without_derivative("gather_reduce", partitioned(run, lookup_plan(run, not padded, weighted), rule))
    return call(_supported(source), indices, _or_empty(offsets, jnp.int32), _or_empty(weights, jnp.float32))


def tensor_cast(ids: jax.Array, offsets: jax.Array | None, *, num_rows: int, unique_capacity: int) -> Cast:
    """See ``jrec.ops.tensor_cast``."""
    from jrec.native import cast_kernels

    capacity, threads = ids.size, int(threads_attribute())
    # Scratch is a static size, so chunks are cut for the threads that there are when the program is traced.
    chunks = max(1, min(4 * threads, capacity // _ENTRIES_PER_CHUNK)) if threads > 1 else 1
    # Pairs are uint32 for uint64: JAX has no 64-bit arrays unless ``jax_enable_x64`` is set.
    results = [
        _i32(unique_capacity), _i32(unique_capacity + 1), _i32(capacity), _i32(capacity),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((4 * capacity,), jnp.uint32),  # uint64 pairs, twice
        _i32(0 if offsets is None else capacity), _i32(chunks << cast_kernels.MAX_DIGIT_BITS),
    ]  # fmt: skip
    call = custom_call("handlers", "tensor_cast", results)
    rows, bounds, sources, positions, num_unique, *_ = call(
        ids, _or_empty(offsets, jnp.int32), num_rows=np.int64(num_rows), threads=np.int64(threads)
    )
    return Cast(rows=rows, offsets=bounds, sources=sources, positions=positions, num_unique=num_unique)


def row_update(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    rows: jax.Array,
    gradients: jax.Array,
    step: jax.Array,
    scale: jax.Array,
    rounding_key: jax.Array | None,
    rounding_rows: jax.Array | None = None,
) -> tuple[jax.Array, Slots]:
    """See ``jrec.ops.row_update``."""
    # The numbers of a step are an operand: a schedule's rate changes without another compilation.
    operands = [hyperparameters(optimizer, step, scale, rounding_key), rows, gradients]
    return _update("row_update", optimizer, _supported(table), slots, operands, [], rounding_rows)


def casted_update(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    cast: Cast,
    bag_gradients: jax.Array,
    weights: jax.Array | None,
    step: jax.Array,
    scale: jax.Array,
    rounding_key: jax.Array | None,
    rounding_rows: jax.Array | None = None,
) -> tuple[jax.Array, Slots]:
    """See ``jrec.ops.casted_update``: gather-reduce and step in one pass over the rows."""
    from jrec.native import segment_kernels as kernels

    capacity = cast.sources.shape[0]
    chunks, pieces = _split(capacity, cast.rows.shape[0], capacity, kernels.UPDATE_COST)
    operands = [
        hyperparameters(optimizer, step, scale, rounding_key), cast.rows, cast.offsets, cast.sources, cast.positions,
        bag_gradients, _or_empty(None if weights is None else weights.reshape(-1), jnp.float32), cast.num_unique,
    ]  # fmt: skip
    scratch = [_f32(pieces, bag_gradients.shape[1]), _i32(chunks if pieces else 0)]
    return _update("casted_update", optimizer, _supported(table), slots, operands, scratch, rounding_rows)


def _update(
    name: str,
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    operands: list[jax.Array],
    scratch: list[jax.ShapeDtypeStruct],
    rounding_rows: jax.Array | None,
) -> tuple[jax.Array, Slots]:
    casted, kept = name == "casted_update", len(optimizer.slots)
    state = [table, *(slots[slot] for slot in optimizer.slots)]
    last = [] if rounding_rows is None else [rounding_rows]

    # Numbers, not arrays: JAX keeps ``run`` in the program, where ``jax.checking_leaks`` would find tracers.
    first, count = len(operands), len(state)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        held = arrays[first : first + count]
        results = [*scratch, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in held)]
        # Table and slots are stepped where they lie if they are donated; XLA copies them beforehand where they are not.
        aliases = {first + i: len(scratch) + i for i in range(count)}
        call = custom_call("handlers", name, results, aliases)
        return tuple(call(*arrays, kind=np.int64(kind_of(optimizer)), threads=threads_attribute())[len(scratch) :])

    arrays = [*operands, *state, *last]
    call = partitioned(run, update_plan(run, casted, kept), update_rule(arrays, casted, kept))
    call = without_derivative(name, call)
    new = call(*arrays)
    return new[0], dict(zip(optimizer.slots, new[1:], strict=True))


def _split(capacity: int, segments: int, longest: int, segment_cost: int) -> tuple[int, int]:
    """Chunks, and rows of partial sums."""
    from jrec.native.segment_kernels import max_chunks, max_pieces

    chunks = max_chunks(capacity, segments, segment_cost)
    return chunks, max_pieces(longest, chunks)


def _supported(array: jax.Array) -> jax.Array:
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"native kernels take float32, bfloat16 and float16, not {array.dtype}; use 'xla'")
    return array


def _or_empty(array: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    return jnp.zeros(0, dtype) if array is None else array


def _i32(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)


def _f32(rows: int, dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, dim), jnp.float32)
