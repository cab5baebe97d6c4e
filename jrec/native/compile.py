"""Compiles numba kernels to plain C functions, once per machine, on first use.

Kernels take raw addresses and are called only by their own addresses: from Python threads (``host``) and from
XLA's (``ffi``). So there is one specialization of each, whatever the arrays' dtypes and ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jrec.kernel_cache import cache_of
from jrec.native.llvm_types import Intrinsic

if TYPE_CHECKING:
    import numpy as np
    from numba.core.typing.templates import Signature

# No "nnan", "ninf": NaN marks an index past the table. "reassoc" vectorizes the sums over a row's elements; the order
# it picks is fixed at compile time, so results still do not depend on threads.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}

inlined = functools.partial(numba.njit, nogil=True, error_model="numpy", fastmath=FASTMATH)
"""Decorates a helper that kernels call."""

# Re-entrant: compiling a kernel first compiles those that it requires, in the same thread.
_LOCK = threading.RLock()


class Kernel:
    """A numba function as a C function, compiled or read from the cache when its address is first asked for.

    Attributes:
      symbol: The name under which other kernels reach it.
    """

    def __init__(self, function: Callable[..., object], signature: Signature, requires: tuple[Kernel, ...]):
        self.symbol = f"jrec_native_{function.__name__}"
        self._function, self._signature, self._requires = function, signature, requires

    @functools.cached_property
    def compiled(self) -> Any:
        """The numba C callback; its ``ctypes`` attribute calls it with the GIL released."""
        # LLVM resolves a kernel's symbols when its code is loaded,
        # from the cache, too: the required ones must be there before.
        with _LOCK:
            for kernel in self._requires:
                binding.add_symbol(kernel.symbol, kernel.address)
            return _compiled(self._function, self._signature)

    @property
    def address(self) -> int:
        """The address of the C function."""
        return self.compiled.address

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """The C function as a Python callable that releases the GIL."""
        return self.compiled.ctypes


def kernel(signature: Signature, *, requires: tuple[Kernel, ...] = ()) -> Callable[[Callable[..., object]], Kernel]:
    """Decorates a function of integers as a ``Kernel``; ``requires`` are those it reaches by ``address_of``."""
    return lambda function: Kernel(function, signature, requires)


def _compiled(function: Callable[..., object], signature: Signature) -> Any:
    """As ``numba.cfunc(cache=True)``, with a cache as of ``compiled``."""
    from numba.core.ccallback import CFunc
    from numba.core.sigutils import normalize_signature

    callback: Any = CFunc(function, normalize_signature(signature), {}, {"error_model": "numpy", "fastmath": FASTMATH})
    if (cache := cache_of(function)) is not None:
        callback._cache = cache
    callback.compile()
    return callback


def address_of(symbol: str) -> Intrinsic:
    """An intrinsic that gives the address of a kernel or C library function, resolved when the code is loaded."""

    @intrinsic
    def address(typing_context):
        def codegen(context, builder, signature, args):
            function = cgutils.get_or_insert_function(
                # The declared type does not matter: only the address is taken, and whoever calls it casts it to what it
                # is.
                builder.module,
                ir.FunctionType(ir.VoidType(), [ir.IntType(64), ir.IntType(64)]),
                symbol,
            )
            return builder.ptrtoint(function, ir.IntType(64))

        return types.int64(), codegen

    return address


def c_function(symbol: str, result: types.Type, *arguments: types.Type) -> Any:
    """An intrinsic that calls a function of the C library; arguments and result are numba integer types."""

    def signature_of(context):
        values = [context.get_value_type(a) for a in arguments]
        return ir.FunctionType(ir.VoidType() if result == types.void else context.get_value_type(result), values)

    def codegen(context, builder, signature, args):
        function = cgutils.get_or_insert_function(builder.module, signature_of(context), symbol)
        value = builder.call(function, args)
        return context.get_dummy_value() if result == types.void else value

    if len(arguments) == 0:

        @intrinsic
        def call0(typing_context):
            return result(), codegen

        return call0

    @intrinsic
    def call1(typing_context, argument):
        return result(*arguments), codegen

    return call1


def pointer(array: np.ndarray) -> int:
    """The address of a NumPy array's first element."""
    return array.__array_interface__["data"][0]
