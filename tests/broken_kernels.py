"""Kernels that are right and fast, slow, wrong in several ways, that crash and that hang, for tests of the check.

They run on a CPU. Which class misbehaves how is told by its dim, so that one child meets several.
"""

from __future__ import annotations

import ctypes
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from jrec.selfcheck import kernels
from jrec.selfcheck.kernels import casted_update as casted_update
from jrec.selfcheck.kernels import tensor_cast as tensor_cast
from jrec.selfcheck.kernels import tt_products as tt_products

FAST, SLOW, WRONG, WRONG_NAN, UNSTEADY, ABORT, SEGFAULT, HANG, HANG_TRACE, RAISE, REFUSE, EXIT, NO_COMPILE = range(
    1, 14
)
_calls = iter(range(10**9))


def gather_reduce(implementation, source, indices, offsets, weights):
    """XLA's sums, and then what the dim says."""
    del implementation
    out = kernels.gather_reduce("xla", source, indices, offsets, weights)
    behave = _BEHAVIOURS.get(source.shape[1])
    return out if behave is None else behave(out)


def row_update(implementation, optimizer, table, slots, rows, gradients, **options):
    """XLA's update, which also touches a row that nobody named."""
    del implementation
    table, slots = kernels.row_update("xla", optimizer, table, slots, rows, gradients, **options)
    return table.at[0, 0].add(jnp.asarray(2.0**-7, table.dtype)), slots


def _on_host(action):
    def act(out):
        def host(values):
            action()
            return values

        return jax.pure_callback(host, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    return act


def _unsteady(out):
    def host(values):
        return values * np.float32(1 + 2.0**-23 * (next(_calls) % 2))

    return jax.pure_callback(host, jax.ShapeDtypeStruct(out.shape, out.dtype), out)


def _slow(out):
    def again(_, value):
        return jnp.sort(value + 1e-30, axis=0)

    wasted = jax.lax.fori_loop(0, 300, again, out)
    return jnp.where(wasted > 1e30, wasted, out)


def _raise():
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS, as it were")


def _refuse(out):
    raise NotImplementedError("no rows of this dim")


def _fail_to_compile(out):
    raise ValueError("ptxas died")


def _hang_while_tracing(out):
    time.sleep(3600)


_BEHAVIOURS = {
    SLOW: _slow,
    WRONG: lambda out: out.at[-1].multiply(1.001),
    WRONG_NAN: lambda out: jnp.where(jnp.isnan(out), 0.0, out),
    UNSTEADY: _unsteady,
    ABORT: _on_host(os.abort),
    SEGFAULT: _on_host(lambda: ctypes.string_at(0)),
    HANG: _on_host(lambda: time.sleep(3600)),
    HANG_TRACE: _hang_while_tracing,
    RAISE: _on_host(_raise),
    REFUSE: _refuse,
    EXIT: _on_host(lambda: os._exit(0)),
    NO_COMPILE: _fail_to_compile,
}
