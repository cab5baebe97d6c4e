"""How the data room compiles its kernels: without the GIL, cached on disk where that is possible."""

from __future__ import annotations

from numba import njit


def compiled(function):
    """``numba.njit`` that releases the GIL, with a cache unless no folder for one can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:  # neither the package's folder nor the user's cache folder can be written
        if "no locator available" not in str(error):
            raise
        return njit(nogil=True)(function)
