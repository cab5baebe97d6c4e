"""Ray's workers as an executor of ``concurrent.futures``, for ``jrec prepare --ray``."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jrec.errors import ConfigError
from jrec.optional_packages import remedy


def require_ray(module: str = "ray") -> Any:
    """The ``ray`` package, or a module of it.

    Raises:
      ConfigError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"Ray is needed, but cannot be imported ({error}): {remedy('ray')}") from error


@contextlib.contextmanager
def connected(address: str, *, cpus: int | None = None) -> Iterator[None]:
    """A connection to a Ray cluster, which ends with the block.

    Args:
      address: HOST:PORT, "auto" for the cluster that this machine belongs to, or "local" to start one on this machine.
      cpus: Of "local", how many workers run at a time; by default the machine's cores.

    Raises:
      ConfigError: If Ray is not installed, or there is no cluster at that address.
    """
    ray = require_ray()
    own: dict[str, object] = {}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(address=address, logging_level="warning", **own)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address!r}: {error}; run ray start --head, or say local") from error
    try:
        yield
    finally:
        ray.shutdown()


class RayExecutor(concurrent.futures.Executor):
    """Runs each function as a Ray task of one core, in the folder where this process works.

    A future whose worker dies raises Ray's error; whoever waits decides whether to submit the call again.
    """

    def __init__(self) -> None:
        ray = require_ray()
        self._cancel = ray.cancel
        self._run = ray.remote(num_cpus=1, max_retries=0)(_run)
        self._folder = pathlib.Path.cwd()
        self._pending: dict[concurrent.futures.Future, object] = {}

    def submit[**P, R](self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        """Hands a call to the cluster; function and arguments are pickled."""
        reference = self._run.remote(self._folder, fn, args, kwargs)
        future = reference.future()
        self._pending[future] = reference
        # The callback is given the future itself, which is the key.
        future.add_done_callback(self._pending.pop)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for the calls that are not done; ``cancel_futures`` kills their workers (threads would run on)."""
        pending = dict(self._pending)
        if cancel_futures:
            for reference in pending.values():
                self._cancel(reference, force=True)
        if wait:
            concurrent.futures.wait(pending)


def _run[R](
    folder: pathlib.Path, function: Callable[..., R], arguments: tuple[object, ...], options: dict[str, object]
) -> R:
    os.chdir(folder)
    return function(*arguments, **options)
