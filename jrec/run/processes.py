"""The processes of a run, of which each has some of the mesh's devices."""

from __future__ import annotations

from typing import Any

import jax

from jrec.errors import ProcessError


def first() -> bool:
    """Whether this is the process that writes logs and reports."""
    return jax.process_index() == 0


def several() -> bool:
    """Whether several processes train, each of which sees only its own part of a batch."""
    return jax.process_count() > 1


def wait_for_all(name: str) -> None:
    """Returns when every process has called it; ``name`` must be the same everywhere."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def coordinator_host() -> str:
    """The host at which the other processes reach process 0.

    Raises:
      ProcessError: If JAX was not told.
    """
    return str(joined().coordinator_address).rpartition(":")[0].strip("[]")


def key_values() -> Any:
    """JAX's client of its coordination service, whose key-value store all processes share.

    Raises:
      ProcessError: If the processes have not joined.
    """
    return joined().client


def published(key: str, seconds: float) -> str:
    """The value that a process has set for ``key`` in the shared key-value store, once it is there.

    Raises:
      ProcessError: If it is not there within ``seconds``.
    """
    try:
        return key_values().blocking_key_value_get(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(
            f"another process did not set {key} within {seconds:g} s; look at the output of the others"
        ) from error


def joined() -> Any:
    """JAX's record of what ``jax.distributed.initialize`` was given, or found; reading it starts no device.

    Raises:
      ProcessError: If the processes have not joined.
    """
    from jax._src.distributed import global_state

    if global_state.client is None:
        raise ProcessError("JAX does not know its coordinator; call jax.distributed.initialize before anything else")
    return global_state
