"""One step of the survey as a process of its own: its lines taken one by one, and all of it ended when time is up."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal

MAX_LINE = 1 << 16  # characters; longer lines are garbage
GRACE = 3.0  # seconds between asking a group of processes to end and killing it
TAIL = 40  # lines of stderr and of garbage that are kept

Outcome = Literal["ended", "crashed", "timeout", "stalled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    Attributes:
      outcome: "ended" for status 0, "crashed" for another, "timeout" and "stalled" where it was killed.
      status: The exit status, negative for a signal; None where it could not even be killed.
      seconds: How long it ran.
      lines: JSON lines it printed.
      garbage: Other lines it printed on stdout.
      tail: The end of stderr and garbage.
    """

    outcome: Outcome
    status: int | None
    seconds: float
    lines: int
    garbage: int
    tail: str


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | os.PathLike[str],
    take: Callable[[dict[str, Any]], None],
    timeout: float,
    stall: float,
) -> Ending:
    """Runs a command and hands each JSON object that it prints to ``take``, at once.

    Args:
      command: The command.
      environment: Its whole environment.
      folder: Where it runs.
      take: Called with each line, in this thread.
      timeout: Seconds until its group of processes is killed.
      stall: Seconds without any output, on stdout or stderr, until it is killed as well.
    """
    start = last = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", process_group=0,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    printed: queue.Queue[tuple[str, str | None]] = queue.Queue()
    readers = [
        threading.Thread(target=_read, args=(name, stream, printed), daemon=True)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    for reader in readers:
        reader.start()
    tail: collections.deque[str] = collections.deque(maxlen=TAIL)
    counts = collections.Counter[str]()
    outcome: Outcome | None = None
    open_streams = len(readers)

    def handle(name: str, text: str) -> None:
        line = _parsed(text) if name == "stdout" else None
        if line is not None:
            counts["lines"] += 1
            take(line)
            return
        counts["garbage"] += name == "stdout"
        tail.append(text.rstrip("\n")[:500])

    try:
        while open_streams and outcome is None:
            now = time.monotonic()
            if now - start > timeout:
                outcome = "timeout"
            elif now - last > stall:
                outcome = "stalled"
            try:
                name, text = printed.get(timeout=0.2)
            except queue.Empty:
                if process.poll() is not None and time.monotonic() - last > GRACE:
                    break  # it ended, and left a process of its own that holds its streams open
                continue
            last = time.monotonic()
            if text is None:
                open_streams -= 1
            else:
                handle(name, text)
    finally:
        status = _end(process, wait=outcome is None)
    for reader in readers:
        reader.join(GRACE)
    with contextlib.suppress(queue.Empty):  # what it printed last
        while True:
            name, text = printed.get(timeout=0.2)
            if text is not None:
                handle(name, text)
    return Ending(
        outcome=outcome or ("ended" if status == 0 else "crashed"),
        status=status,
        seconds=round(time.monotonic() - start, 2),
        lines=counts["lines"],
        garbage=counts["garbage"],
        tail="\n".join(tail)[-4000:],
    )


def _read(name: str, stream: IO[str], printed: queue.Queue[tuple[str, str | None]]) -> None:
    with stream:
        while text := stream.readline(MAX_LINE + 1):  # a line without an end must not fill the memory
            printed.put((name, text))
    printed.put((name, None))


def _parsed(text: str) -> dict[str, Any] | None:
    if len(text) > MAX_LINE or not text.startswith("{"):
        return None
    try:
        line = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _end(process: subprocess.Popen[str], *, wait: bool) -> int | None:
    """Ends whatever is left of the process's group, and gives the process's status."""
    if wait:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    return process.poll()  # None: it waits for the GPU in the kernel, where no signal reaches it
