"""Runs the check in child processes: one serves many classes, and a crash or a hang loses only the class it was at."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from jrec.errors import JrecError
from jrec.ops.verdicts import KERNELS_VARIABLE, KernelClass, Reason, Verdict

CLASS_SECONDS = 60.0
START_SECONDS = 120.0  # importing JAX and opening a GPU takes seconds, on a busy machine many
_END_SECONDS = 5.0  # after which a process that was killed is left to the system


class SelfCheckError(JrecError):
    """Kernels could not be checked at all."""


class OtherDeviceError(Exception):
    """The child runs on another device than was expected; ``kind`` is its name."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How the check is run.

    Attributes:
      device: The name that the child's device must have; None for any.
      platform: JAX's platform of the children, "cuda" or "cpu".
      timeout: Seconds for one class.
      start_timeout: Seconds until a child has its device.
      kernels: See ``child.Request``.
      interpret: See ``child.Request``.
      tiny: See ``child.Request``.
    """

    device: str | None = None
    platform: str = "cuda"
    timeout: float = CLASS_SECONDS
    start_timeout: float = START_SECONDS
    kernels: str = "jrec.selfcheck.kernels"
    interpret: bool = False
    tiny: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class At:
    """Progress: which class is being checked, and where."""

    kernel_class: KernelClass
    where: str


def run_checks(
    classes: Sequence[KernelClass], options: How, *, deadline: float | None = None
) -> Iterator[At | Verdict]:
    """Checks classes in children, and yields where it is, and each verdict as soon as it is there.

    Args:
      classes: What to check.
      options: How to run the checks.
      deadline: On ``time.monotonic``'s clock: after it, what is not checked stays without a verdict. None for none.

    Raises:
      SelfCheckError: If a child cannot be started, or ends before it comes to a class.
      OtherDeviceError: If a child has another device than ``options.device``.
    """
    waiting = list(classes)
    while waiting and not _past(deadline):
        done = 0
        for event in _one_child(waiting, options, deadline):
            done += isinstance(event, Verdict)
            yield event
        del waiting[:done]
        if not done:
            return  # the deadline came before the first


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _one_child(classes: Sequence[KernelClass], options: How, deadline: float | None) -> Iterator[At | Verdict]:
    """The events of one child, until it ends or has to be ended; the class it was at gets a verdict too."""
    request = {
        "classes": [str(kernel_class) for kernel_class in classes],
        "kernels": options.kernels,
        "interpret": options.interpret,
        "tiny": options.tiny,
    }
    with _child(request, options) as (process, lines, errors):
        current: KernelClass | None = None
        finished = 0
        limit = time.monotonic() + options.start_timeout
        while True:
            event = _next(lines, limit if deadline is None else min(limit, deadline))
            if event is None and _past(deadline):
                return
            if event is None and current is None and not finished:
                raise SelfCheckError(
                    f"the check's process had no device after {options.start_timeout:g} s; see whether other programs"
                    f" use the GPU. {_tail(errors)}"
                )
            if event is None:
                if current is not None:
                    detail = f"no answer within {options.timeout:g} s"
                    yield _failed(current, "timed out", detail)
                return
            match event.pop("event"):
                case "device":
                    if options.device is not None and event["kind"] != options.device:
                        raise OtherDeviceError(event["kind"])
                case "start":
                    current = KernelClass.parse(event["kernel_class"])
                    limit = time.monotonic() + options.timeout
                    yield At(kernel_class=current, where="")
                case "at" if current is not None:
                    yield At(kernel_class=current, where=event["where"])
                case "verdict":
                    current, finished = None, finished + 1
                    limit = time.monotonic() + options.start_timeout
                    yield dataclasses.replace(Verdict.from_dict(event), date=_now())
                case "end":
                    code = _code(process)
                    if current is not None:
                        yield _failed(current, "crashed", f"the process {_how_it_ended(code)}. {_tail(errors)}".strip())
                    elif not finished and classes:
                        raise SelfCheckError(f"the check's process {_how_it_ended(code)}. {_tail(errors)}".strip())
                    return


def _failed(kernel_class: KernelClass, reason: Reason, detail: str) -> Verdict:
    return Verdict(kernel_class=kernel_class, right=False, reason=reason, detail=detail, date=_now())


@contextlib.contextmanager
def _child(
    request: Mapping[str, Any], options: How
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[dict[str, Any]], IO[bytes]]]:
    command = [sys.executable, "-m", "jrec.selfcheck.child"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(options.platform),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.Queue[dict[str, Any]] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            yield process, lines, errors
        finally:
            _end(process)
            with contextlib.suppress(OSError):
                process.stdin.close()
            reader.join(_END_SECONDS)
            if not reader.is_alive():
                process.stdout.close()


def _environment(platform: str) -> dict[str, str]:
    """The parent's environment, with a GPU that is shared: the child takes no more of its memory than it needs."""
    changes = {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    kept = {name: value for name, value in os.environ.items() if name != KERNELS_VARIABLE}
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the child imports what this process does
    return kept | changes | {"PYTHONPATH": path}


def _read(stdout: IO[str], lines: queue.Queue[dict[str, Any]]) -> None:
    for line in stdout:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # what a compiler or a driver prints
        if isinstance(event, dict) and "event" in event:
            lines.put(event)
    lines.put({"event": "end"})


def _next(lines: queue.Queue[dict[str, Any]], limit: float) -> dict[str, Any] | None:
    try:
        return lines.get(timeout=max(0.0, limit - time.monotonic()))
    except queue.Empty:
        return None


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a child and what it started; one that the driver does not let go is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)


def _code(process: subprocess.Popen[str]) -> int | None:
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its output"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _tail(errors: IO[bytes]) -> str:
    """The last words on a child's standard error."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 400))
    text = " ".join(errors.read().decode(errors="replace").split())
    return f"Its last words: {text}" if text else ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
