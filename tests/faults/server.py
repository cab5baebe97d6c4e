"""A process under the layer of ``layer.c`` that has jrec's modules loaded, and forks a child for every try.

It reads a JSON object a line, ``Request``'s fields, and answers with one, ``Reply``'s. A child is a process like one of
``jrec``: it ends as the interpreter ends, with its threads, so that what would hang there hangs here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import importlib
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A try: what to run in ``folder``, and what becomes of the call ``at`` of those of ``kinds`` below ``within``."""

    folder: str
    within: str
    command: list[str]
    kinds: int = 0
    action: int = 0
    number: int = 0
    at: int = 0
    seconds: float = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """How it ended: the exit code (minus the signal's number), or a hang; what it said; calls seen; the call met."""

    code: int
    hung: bool
    said: str
    seen: int
    met: str
    seconds: float


def serve() -> Request | None:
    """Answers requests; in each child returns what it is to run."""
    layer = ctypes.CDLL(None)
    layer.faults_share()
    for line in sys.stdin:
        request = Request(**json.loads(line))
        said, met = (os.memfd_create(name) for name in ("said", "met"))
        fcntl.fcntl(met, fcntl.F_SETFL, os.O_APPEND)  # several threads' lines: of such a file Linux guards no position
        begin = time.monotonic()
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.setpgid(0, 0)
            os.chdir(request.folder)
            arguments = (request.kinds, request.action, request.number, request.at, met)
            layer.faults_arm(request.within.encode(), *arguments)
            return request
        code, hung = _ended(child, request.seconds)
        reply = Reply(
            code=code, hung=hung, said=_content(said), seen=layer.faults_seen(), met=_content(met),
            seconds=time.monotonic() - begin,
        )  # fmt: skip
        print(json.dumps(dataclasses.asdict(reply)), flush=True)
    return None


def _ended(child: int, seconds: float) -> tuple[int, bool]:
    """The exit code, and whether the child had to be killed."""
    end = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), False
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), True
        time.sleep(0.005)


def _content(descriptor: int) -> str:
    text = pathlib.Path(f"/proc/self/fd/{descriptor}").read_bytes().decode(errors="replace")
    os.close(descriptor)
    return text


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sys.modules.setdefault("orbax.checkpoint", None)  # pyright: ignore[reportArgumentType] (as the command does)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "numba" in sys.modules:  # what its first kernel would load in every child, for half a second
        from numba.core import registry

        target: Any = registry.cpu_target
        target.typing_context.refresh()
        target.target_context.refresh()
    if (asked := serve()) is not None:
        sys.argv = asked.command
        if asked.command[0] == "jrec":
            from jrec.cli import main
        else:
            main = getattr(importlib.import_module(asked.command[0]), asked.command[1])
        sys.exit(main())
