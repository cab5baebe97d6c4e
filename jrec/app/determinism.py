"""The key ``deterministic``: how a run asks for the same bits every time, and what holds without it.

Imports no JAX, so that a command can ask before JAX reads its flags.
"""

from __future__ import annotations

import os
import sys

from jrec.errors import ConfigError

FLAG = "--xla_gpu_deterministic_ops"

_CPU = "the same bits every time"
_KEY = "the same bits every time on GPUs of this kind with these versions: deterministic is true"
_DEFAULT = (
    "rows of tables: the same bits every time from the same gradients, by XLA and by jrec's kernels, but not from one"
    " to the other; other sums: not promised, since XLA may choose other algorithms when it compiles a program again."
    " deterministic=true fixes those too"
)


def is_requested() -> bool:
    """Whether ``XLA_FLAGS`` asks for deterministic programs on GPUs."""
    set_to = [word.removeprefix(FLAG) for word in os.environ.get("XLA_FLAGS", "").split() if word.startswith(FLAG)]
    return bool(set_to) and set_to[-1].lower() in ("", "=true", "=1")


def request(*, required: bool = True) -> None:
    """Asks XLA for the same bits every time on GPUs, by ``XLA_FLAGS``. Call it before JAX starts its devices.

    Args:
      required: Whether it is an error if JAX has already started GPUs without it; else they stay as they are.

    Raises:
      ConfigError: If ``required`` and JAX has already started GPUs without it.
    """
    if is_requested():
        return
    if platform := _started_platform():
        if platform == "cpu" or not required:
            return
        raise ConfigError(
            f"deterministic is true, but JAX has started its {platform} devices without XLA_FLAGS={FLAG}=true; set that"
            " variable for the whole process, or call jrec.app.determinism.request() before anything that uses JAX"
        )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=true".strip()


def promise(platform: str) -> str:
    """How far two runs of one program on ``platform`` agree bit by bit, for a run's report."""
    if platform == "cpu":
        return _CPU
    return _KEY if is_requested() else _DEFAULT


def _started_platform() -> str | None:
    """The platform of JAX's devices, or None before they are started."""
    if "jax" not in sys.modules:
        return None
    from jax._src import xla_bridge  # no public function says whether devices are started without starting them

    if not xla_bridge.backends_are_initialized():
        return None
    import jax

    return jax.default_backend()
