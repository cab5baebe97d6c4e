"""Tables divided by rows that reach a GPU's kernel under plain ``jit``: refused when the program is compiled.

XLA knows nothing of a kernel and would gather all operands of one on every device. How XLA divides an array is known
when it compiles: a custom partitioning is asked then, and never in a program of one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, Sharding

from jrec.native.partition import rules_apply

_Arrays = Sequence[jax.ShapeDtypeStruct]  # each with its sharding


def undivided(array: jax.Array) -> jax.Array:
    """``array``; compiling a program for several devices that divide it, outside ``shard_map``, raises ValueError."""
    # Inside ``shard_map`` the array is the device's own, whatever the mesh.
    if not rules_apply([array]):
        return array
    return _checked(array)


@jax.custom_batching.custom_vmap
def _checked(array: jax.Array) -> jax.Array:
    same = custom_partitioning(lambda x: x)
    names = " ".join(f"d{i}" for i in range(array.ndim))
    same.def_partition(_partition, infer_sharding_from_operands=_as_given, sharding_rule=f"{names} -> {names}")
    return same(array)


@_checked.def_vmap
def _batched(size: int, flags: object, array: jax.Array) -> tuple[jax.Array, bool]:
    del size, flags
    return _checked(array), True


def _as_given(mesh: Mesh, arguments: _Arrays, result: object) -> Sharding:
    del mesh, result
    return arguments[0].sharding


def _partition(mesh: Mesh, arguments: _Arrays, result: jax.ShapeDtypeStruct) -> tuple[object, ...]:
    (array,) = arguments
    if not array.sharding.is_fully_replicated:
        spec = getattr(array.sharding, "spec", array.sharding)
        raise ValueError(
            f"a table of shape {array.shape} is divided as {spec}, which jrec's GPU kernels would gather whole on every"
            " device; call the op inside jax.shard_map (jrec.distribute does), or name implementation='xla'"
        )
    return mesh, lambda x: x, result.sharding, (array.sharding,)
