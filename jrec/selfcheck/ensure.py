"""Checks what has no verdict yet, once on a host, and keeps what was found."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

from jrec.errors import JrecError
from jrec.ops import verdicts
from jrec.ops.local_gpu import Gpu
from jrec.ops.verdicts import KernelClass, Machine, Verdict, read_verdicts
from jrec.selfcheck.runner import At, How, OtherDeviceError, run_checks
from jrec.selfcheck.store import locked, record

WAIT_SECONDS = 600.0  # for another process' check

Progress = Callable[[At | Verdict, int, int], None]
"""Told an event, how many classes are done, and how many there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What became of a check.

    Attributes:
      machine: What the verdicts hold for.
      verdicts: By class, old ones and new ones; those that the time did not suffice for are not in here.
      new: How many were found now.
      seconds: How long the check took, waiting for others included.
    """

    machine: Machine
    verdicts: dict[KernelClass, Verdict]
    new: int
    seconds: float


def missing(classes: Sequence[KernelClass], gpu: Gpu) -> tuple[KernelClass, ...]:
    """Those without a verdict on this GPU."""
    known = read_verdicts(verdicts.verdict_file(), Machine.of(gpu))
    return tuple(kernel_class for kernel_class in classes if kernel_class not in known)


def ensure(
    classes: Sequence[KernelClass],
    gpu: Gpu,
    options: How,
    *,
    progress: Progress = lambda event, done, total: None,
    again: bool = False,
    budget: float | None = None,
    wait: float = WAIT_SECONDS,
) -> Checked:
    """Checks the classes that have no verdict, and keeps each verdict as soon as it is there.

    Of several processes on a host one checks at a time; the others wait for it and find its verdicts.

    Args:
      classes: What is wanted.
      gpu: What the check will run on, as far as is known; its children tell in truth.
      options: How to run it.
      progress: Told what happens.
      again: Whether classes with a verdict are checked too.
      budget: Seconds for all of it; what they do not suffice for stays without a verdict. None for no limit.
      wait: Seconds to wait for other processes' checks.

    Raises:
      LockTimeoutError: If another process checks for longer than ``wait``.
      SelfCheckError: If nothing can be checked.
      OSError: If verdicts cannot be written.
    """
    path = verdicts.verdict_file()
    begin = time.monotonic()
    with locked(path.with_name("kernels.check.lock"), seconds=wait):
        deadline = None if budget is None else time.monotonic() + budget
        for _ in range(2):
            machine = Machine.of(gpu)
            unchecked = list(classes) if again else list(missing(classes, gpu))
            try:
                new = _check(
                    unchecked, path, machine, dataclasses.replace(options, device=gpu.kind), progress, deadline
                )
                break
            except OtherDeviceError as other:  # a slice of a GPU, say, which the driver's list does not tell
                gpu = dataclasses.replace(gpu, kind=other.kind)
        else:
            raise JrecError(f"the check's processes run on different devices, {gpu.kind} the last; set"
                            " CUDA_VISIBLE_DEVICES to one of them")  # fmt: skip
    verdicts.reread()
    known = read_verdicts(path, machine)
    verdicts_now = {kernel_class: known[kernel_class] for kernel_class in classes if kernel_class in known}
    return Checked(machine=machine, verdicts=verdicts_now, new=new, seconds=time.monotonic() - begin)


def _check(
    unchecked: Sequence[KernelClass],
    path: pathlib.Path,
    machine: Machine,
    options: How,
    progress: Progress,
    deadline: float | None,
) -> int:
    done = 0
    for event in run_checks(unchecked, options, deadline=deadline):
        if isinstance(event, Verdict):
            record(path, machine, [event])
            done += 1
        progress(event, done, len(unchecked))
    return done
