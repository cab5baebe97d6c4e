"""Packages that only an extra of jrec brings, and what a message says where one is not installed."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jrec.errors import JrecError

EXTRA_OF = dict.fromkeys(("array_record", "grain", "pyarrow", "scipy", "rich", "tensorboardX"), "train")
"""The extra that brings a module; ``serve`` brings pyarrow, too."""


class MissingPackageError(JrecError, ModuleNotFoundError):
    """A package of an extra is not installed; the message says how it is."""


def remedy(extra: str) -> str:
    """How an extra is installed, from an index or from a clone."""
    return f"pip install 'jrec[{extra}]', or in a clone of the repository pip install '.[{extra}]'"


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error itself, or where an extra has the module, one that names the extra."""
    module = (error.name or "").partition(".")[0]
    if isinstance(error, MissingPackageError) or module not in EXTRA_OF:
        return error
    return MissingPackageError(f"this needs {module}, which is not installed: {remedy(EXTRA_OF[module])}", name=module)


def explains_missing[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: where a module is absent, ``MissingPackageError`` names its extra."""

    @functools.wraps(function)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as error:
            if (known := explained(error)) is error:
                raise
            raise known from error

    return explaining
