"""How long a kernel class takes beside XLA: loops inside one program, so that the device's time is what is measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.dispatch import Implementation
from jrec.ops.tt.index import Level
from jrec.ops.verdicts import KernelClass
from jrec.selfcheck.inputs import hashed_power_law
from jrec.selfcheck.trials import make_optimizer

TABLE_BYTES = 512 << 20  # with slots: past the caches of every GPU, and little of its memory
ROUNDS = 5
_ROUND_SECONDS = 0.02
_SEED = 22

Step = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large the timed cases are.

    Attributes:
      bags: By case: one-hot and multi-hot.
      lengths: Ids a bag in each case.
      table_bytes: What table and slots may take.
      loop: Calls in one program. XLA runs a loop of a known length without asking the host.
    """

    bags: tuple[int, ...] = (32_768, 8_192)
    lengths: tuple[int, ...] = (1, 20)
    table_bytes: int = TABLE_BYTES
    loop: int = 32


SMALL = Size(bags=(64,), lengths=(4,), table_bytes=1 << 16, loop=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """One timed case: ``carry = step(carry, linked, fixed)``, again and again.

    Attributes:
      build: Makes the step from a module of kernels and an implementation's name.
      carry: What a step replaces.
      linked: What it reads and what is made to depend on the step before, so that none is left out or made once for
        all; needed where a step does not read the carry.
      fixed: What else it reads.
    """

    build: Callable[[ModuleType, Implementation], Step]
    carry: Any
    linked: Any = None
    fixed: Any = None


def cases(kernel_class: KernelClass, size: Size) -> Iterator[Timed]:
    """The timed cases of a kernel class."""
    if kernel_class.kernel == "tt_products":
        yield _tt(kernel_class, size)
        return
    for bags, length in zip(size.bags, size.lengths, strict=True):
        yield _rows(kernel_class, bags, length, size)


def _rows(kernel_class: KernelClass, bags: int, length: int, size: Size) -> Timed:
    dim = kernel_class.dim
    assert isinstance(dim, int)
    rng = np.random.default_rng(_SEED)
    optimizer = None if kernel_class.optimizer is None else make_optimizer(kernel_class.optimizer, learning_rate=1e-4)
    elements = 0 if optimizer is None else sum(shape == "element" for shape in optimizer.slots.values())
    itemsize = 4 if kernel_class.kernel == "tensor_cast" else jnp.dtype(kernel_class.dtype).itemsize
    rows = max(16, min(4_000_000, size.table_bytes // (dim * (itemsize + 4 * elements))))
    ids = jnp.asarray(hashed_power_law(rng, rows, bags * length).reshape(bags, length))
    if kernel_class.kernel == "tensor_cast":
        room = min(ids.size, rows)
        return Timed(
            build=lambda t, i: lambda carry, ids, none: t.tensor_cast(i, ids, None, rows, room),
            carry=_on_device(lambda ids: _cast(ids, rows), ids),
            linked=ids,
        )
    key = jax.random.key(_SEED)
    table = _on_device(lambda key: jax.random.normal(key, (rows, dim)).astype(kernel_class.dtype), key)
    if kernel_class.kernel == "gather_reduce":
        return Timed(
            build=lambda t, i: lambda carry, ids, table: t.gather_reduce(i, table, ids, None, None),
            carry=jnp.zeros((bags, dim), jnp.float32),
            linked=ids,
            fixed=table,
        )
    assert optimizer is not None
    carry = table, _on_device(optimizer.init, table)
    cast = _on_device(lambda ids: _cast(ids, rows), ids)
    if kernel_class.kernel == "casted_update":
        gradients = _on_device(lambda key: jax.random.normal(key, (bags, dim)), key)
        return Timed(
            build=lambda t, i: lambda carry, none, a: t.casted_update(i, optimizer, *carry, *a, None),
            carry=carry,
            fixed=(cast, gradients),
        )
    gradients = _on_device(lambda key: jax.random.normal(key, (cast.rows.shape[0], dim)), key)
    return Timed(
        build=lambda t, i: lambda carry, none, a: t.row_update(i, optimizer, *carry, *a),
        carry=carry,
        fixed=(cast.rows, gradients),
    )


def _cast(ids: jax.Array, rows: int) -> Any:
    from jrec.ops import tensor_cast

    return tensor_cast(ids, num_rows=rows, implementation="xla")


def _tt(kernel_class: KernelClass, size: Size) -> Timed:
    assert not isinstance(kernel_class.dim, int)
    height, rank, columns, right_rank = kernel_class.dim
    parents, slices, capacity = (200, 100, 8192) if size.loop == Size().loop else (10, 10, 50)
    rng = np.random.default_rng(_SEED)
    pairs = np.sort(rng.choice(parents * slices, capacity, replace=False))
    level = Level(
        parents=jnp.asarray(pairs // slices, jnp.int32),
        digits=jnp.asarray(pairs % slices, jnp.int32),
        count=jnp.int32(capacity),
    )
    shapes = (parents, height, rank), (slices, rank, columns, right_rank), (capacity, height * columns, right_rank)
    below, core, gradient = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    carry = gradient, jnp.zeros_like(below), jnp.zeros_like(core)
    core = core.astype(kernel_class.dtype)
    return Timed(
        build=lambda t, i: lambda carry, below, a: t.tt_products(i, below, *a),
        carry=carry,
        linked=below,
        fixed=(core, level, gradient),
    )


def _on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function)(*arguments)


def looped(case: Timed, table: ModuleType, implementation: Implementation, size: Size) -> Callable[..., Any]:
    """The function of ``size.loop`` steps of a case: (carry, linked, fixed) to the next carry."""
    step = case.build(table, implementation)

    def run(carry: Any, linked: Any, fixed: Any) -> Any:
        def again(_: Any, state: Any) -> Any:
            carry, linked = state
            return jax.lax.optimization_barrier((step(carry, linked, fixed), linked))

        return jax.lax.fori_loop(0, size.loop, again, (carry, linked))[0]

    return run


def compiled(case: Timed, table: ModuleType, implementation: Implementation, size: Size) -> Callable[..., Any]:
    """That function compiled; it gives up its carry."""
    run = jax.jit(looped(case, table, implementation, size), donate_argnums=0)
    return run.lower(case.carry, case.linked, case.fixed).compile()


def seconds(programs: Sequence[Callable[..., Any]], case: Timed, size: Size) -> list[float]:
    """Median seconds of a step by program; programs take turns, so that a change of the clock hits all of them."""
    carries = [jax.tree.map(lambda x: x.copy(), case.carry) for _ in programs]

    def spent(number: int, calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            carries[number] = programs[number](carries[number], case.linked, case.fixed)
        jax.block_until_ready(carries[number])
        return time.perf_counter() - begin

    calls = []
    for number in range(len(programs)):
        spent(number, 1)
        calls.append(max(1, min(64, round(_ROUND_SECONDS / max(spent(number, 1), 1e-6)))))
    rounds = [[spent(n, calls[n]) / (calls[n] * size.loop) for n in range(len(programs))] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]
