"""Compiles jrec's kernels for one GPU, by the architecture's name, and prints what was checked of each as JSON.

A process for each GPU: Mosaic GPU keeps what it was first asked for.
"""

from __future__ import annotations

import json
import sys

import aot
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ahead_of_time
from jrec import ops
from jrec.pallas import tt
from jrec.pallas.tt.wgmma import wgmma_products

BAGS, LENGTH, ROWS, LOOKUPS = 1000, 8, 50_000, 4096


def step(optimizer: ops.RowOptimizer, table: jax.Array, slots: dict, ids: jax.Array, gradients: jax.Array):
    """Gather, cast and update of a table."""
    sums, residuals = ops.lookup({"t": table}, {"t": ops.Bags(ids=ids)}, implementation="pallas")
    return sums, ops.apply_gradients(
        optimizer, {"t": table}, {"t": slots}, residuals, {"t": gradients}, implementation="pallas"
    )


def ragged(table: jax.Array, ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """Sums of bags of any length."""
    return ops.gather_reduce(table, ids, offsets, implementation="pallas")


def products(below: jax.Array, core: jax.Array, index: jax.Array, gradient: jax.Array):
    """A tensor-train level, and its gradients."""
    out = tt.expand(below, core, index, index, index)
    return out, tt.expand_transpose(gradient, below, core, index, index, index)


def main() -> None:
    """Compiles all of them."""
    architecture = sys.argv[1]
    (target,) = [one for one in (ahead_of_time.H200, *ahead_of_time.OTHERS) if one.architecture == architecture]
    ahead_of_time.compile_for(target)
    shape, index = aot.shape, aot.shape((LOOKUPS,), jnp.int32)
    ids, gradients = aot.shape((BAGS, LENGTH), jnp.int32), aot.shape((BAGS, 64))
    optimizer, rank = ops.RowWiseAdagrad(learning_rate=0.1), 32
    cases = {
        f"step, {dtype}": (
            lambda *arguments: step(optimizer, *arguments), shape((ROWS, 64), dtype), {"sum": shape((ROWS,))}, ids,
            gradients,
        )
        for dtype in ("float32", "bfloat16")
    }  # fmt: skip
    cases["ragged"] = ragged, shape((ROWS, 128)), index, aot.shape((BAGS + 1,), jnp.int32)
    for dtype in ("float32", "bfloat16"):
        core, gradient = shape((200, rank, 4, rank), dtype), shape((LOOKUPS, 16, rank))
        cases[f"tensor train, {dtype}"] = products, shape((200, 4, rank)), core, index, gradient
    found = []
    for name, (function, *arguments) in cases.items():
        donated = {"donate_argnums": (0, 1)} if name.startswith("step") else {}
        for kernel in ahead_of_time.compile_program(function, *arguments, **donated).kernels:
            aot.check_kernel(name, kernel, architecture=architecture)
            assert kernel.shared_bytes == 0, name
            found.append((name, kernel.name, kernel.registers))
    refused = ""
    try:
        wgmma = jax.ShapeDtypeStruct((200, 4, 64), np.float32), jax.ShapeDtypeStruct((200, 64, 64), jnp.bfloat16)
        bounds = jax.ShapeDtypeStruct((201,), np.int32)
        jax.eval_shape(lambda *given: wgmma_products(*given, interpret=None), *wgmma, index, index, bounds)
    except NotImplementedError as error:
        refused = str(error)
    json.dump({"kernels": found, "wgmma": refused}, sys.stdout)


if __name__ == "__main__":
    main()
