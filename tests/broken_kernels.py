"""Kernels that are right and fast, slow, wrong in several ways, that crash and that hang, for tests of the check.

They run on a CPU. Which class misbehaves how is told by its dim. ``python -m broken_kernels REQUEST`` is the check's
process with these kernels.
"""

from __future__ import annotations

import ctypes
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from jrec import ops
from jrec.selfcheck import child, trials

(FAST, SLOW, WRONG, WRONG_NAN, ROUNDED, LOSES_ONE, UNSTEADY, ABORT, SEGFAULT, HANG, RAISE, REFUSE, EXIT) = range(1, 14)
MACHINE = "a CPU"
_calls = iter(range(10**9))
_gather_reduce_together, _row_update = trials.gather_reduce_together, ops.row_update


def install(set_attribute=setattr):
    """Puts these kernels in the place of the GPU's."""
    set_attribute(trials, "gather_reduce_together", gather_reduce_together)
    set_attribute(ops, "row_update", row_update)


def gather_reduce_together(calls, implementation):
    """XLA's sums, and for kernels' the first one's then what its dim says."""
    out, *beside = _gather_reduce_together(calls, "xla")
    behave = _BEHAVIOURS.get(out.shape[1]) if implementation == "pallas" else None
    return [out if behave is None else behave(out), *beside]


def row_update(optimizer, table, slots, rows, gradients, *, implementation, **options):
    """XLA's update; a kernel's also touches rows that nobody named."""
    table, slots = _row_update(optimizer, table, slots, rows, gradients, implementation="xla", **options)
    wrong = 2.0**-7 if implementation == "pallas" else 0.0
    return table + jnp.asarray(wrong, table.dtype), slots


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


_BEHAVIOURS = {
    SLOW: _slow,
    WRONG: lambda out: out.at[-1].multiply(1.001),
    WRONG_NAN: lambda out: jnp.where(jnp.isnan(out), 0.0, out),
    ROUNDED: lambda out: out.astype(jnp.bfloat16).astype(jnp.float32),
    LOSES_ONE: lambda out: jnp.where(out > 0, out - 1 / 32, out),  # of a bag of any number of lookups
    UNSTEADY: _unsteady,
    ABORT: _on_host(os.abort),
    SEGFAULT: _on_host(lambda: ctypes.string_at(0)),
    HANG: _on_host(lambda: time.sleep(3600)),
    RAISE: _on_host(_raise),
    REFUSE: _refuse,
    EXIT: _on_host(lambda: os._exit(0)),
}

if __name__ == "__main__":
    install()
    child.local_machine = lambda: MACHINE
    child.main()
