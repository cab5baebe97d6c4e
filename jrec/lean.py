"""A quick start of the ``jrec`` command's own process: without what only other programs need."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

# grain registers handlers with Orbax where that is installed, as it is with flax; jrec writes checkpoints of its own.
UNUSED = ("orbax.checkpoint",)

_starting = False


@contextlib.contextmanager
def start() -> Iterator[None]:
    """Until ``over`` or the end of the command, Python collects no garbage: what modules make while imported stays."""
    global _starting
    modules: dict[str, Any] = sys.modules
    for name in UNUSED:
        modules.setdefault(name, None)  # so that importing it raises ImportError
    _starting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        over()


def over() -> None:
    """Collects garbage again, but never what there is now: modules, programs, the model; nothing without ``start``."""
    global _starting
    if _starting:
        _starting = False
        gc.freeze()
        gc.enable()
