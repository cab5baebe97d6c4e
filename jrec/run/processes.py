"""The processes of a run, of which each has some of the mesh's devices."""

from __future__ import annotations

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
    from jax._src.distributed import global_state  # what jax.distributed.initialize was given, or found

    if not (address := global_state.coordinator_address):
        raise ProcessError("JAX does not know its coordinator; call jax.distributed.initialize before anything else")
    return address.rpartition(":")[0].strip("[]")
