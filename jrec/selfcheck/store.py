"""The file of verdicts as checks write it: one process at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import pathlib
import time
from collections.abc import Iterable, Iterator

from jrec.errors import JrecError
from jrec.files import save_json
from jrec.ops.verdicts import FORMAT, VERSION, DamagedVerdictsError, KernelClass, Machine, Verdict, logger, read_all

LOCK_SECONDS = 30.0  # a write takes milliseconds
KEPT_MACHINES = 16  # of every change of jrec's sources there is a new one; the oldest are dropped
_POLL_SECONDS = 0.1


class LockTimeoutError(JrecError):
    """Another process holds a lock for longer than this one was ready to wait."""


@contextlib.contextmanager
def locked(path: pathlib.Path, *, seconds: float) -> Iterator[None]:
    """Holds the lock of the file ``path``, which is made if absent and stays.

    The system takes the lock from a process that ends, however it ends, so none is ever left behind.

    Args:
      path: The lock's file.
      seconds: How long to wait for others.

    Raises:
      LockTimeoutError: If another process holds it that long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise LockTimeoutError(
                        f"another process has held {path} for {seconds:g} s; wait for it to end, or end it"
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield  # closing the file lets go of the lock


def record(path: pathlib.Path, machine: Machine, verdicts: Iterable[Verdict]) -> None:
    """Adds a machine's verdicts to the file, in place of older ones on the same classes.

    A damaged file is replaced, with a line in the log.

    Raises:
      LockTimeoutError: If other processes write all the time.
      OSError: If the file cannot be written.
    """
    with locked(path.with_suffix(".lock"), seconds=LOCK_SECONDS):
        everything = _read(path)
        of_machine = everything.pop(machine, {})
        everything[machine] = of_machine | {verdict.kernel_class: verdict for verdict in verdicts}
        _write(path, dict(list(everything.items())[-KEPT_MACHINES:]))


def forget(path: pathlib.Path, classes: Iterable[KernelClass] | None = None) -> int:
    """Removes verdicts on these classes, or on all, of every machine; returns how many there were.

    Raises:
      LockTimeoutError: If other processes write all the time.
      OSError: If the file cannot be written.
    """
    with locked(path.with_suffix(".lock"), seconds=LOCK_SECONDS):
        everything = _read(path)
        dropped = None if classes is None else set(classes)
        kept = {
            machine: {
                kernel_class: verdict
                for kernel_class, verdict in verdicts.items()
                if dropped is not None and kernel_class not in dropped
            }
            for machine, verdicts in everything.items()
        }
        _write(path, {machine: verdicts for machine, verdicts in kept.items() if verdicts})
    return sum(map(len, everything.values())) - sum(map(len, kept.values()))


def _read(path: pathlib.Path) -> dict[Machine, dict[KernelClass, Verdict]]:
    try:
        return read_all(path)
    except DamagedVerdictsError as error:
        logger.warning(f"the verdicts in a damaged file are lost: {error}")
        return {}


def _write(path: pathlib.Path, everything: dict[Machine, dict[KernelClass, Verdict]]) -> None:
    machines = [
        {"machine": dataclasses.asdict(machine), "verdicts": [verdict.to_dict() for verdict in verdicts.values()]}
        for machine, verdicts in everything.items()
    ]
    save_json(path, {"machines": machines}, kind=FORMAT, version=VERSION)
