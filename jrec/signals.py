"""SIGINT and SIGTERM, which shells, job schedulers and people often send more than once where they mean it once."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

ECHO_SECONDS = 2.0
"""A signal that comes sooner after one that was answered is its echo. Wrappers (`uv run`, `srun`, a scheduler that
signals a job's shell and its processes) pass on a signal that the process got itself within milliseconds, and nobody
reads what the first one was answered within two seconds. So time tells what is meant; a count would not."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], object] | int | None

_answering = threading.Lock()
_answered = 0.0
_own = _raised = False


class Interrupted(KeyboardInterrupt):
    """A signal that ends a run or a command.

    Never a plain KeyboardInterrupt: Python kills itself by SIGINT at exit where one, though caught later, has passed
    through ``exec`` of a string, as while modules with named tuples are imported.

    Args:
      message: One line for the user.
      number: The signal that gives the command's exit code, 128 and its number, as shells have it.
    """

    def __init__(self, message: str, number: signal.Signals = signal.SIGINT):
        super().__init__(message)
        self.code = 128 + number


def exit_code(error: KeyboardInterrupt) -> int:
    """The exit code of a command that ends so."""
    return error.code if isinstance(error, Interrupted) else 128 + signal.SIGINT


def answer(respond: Callable[[signal.Signals], None]) -> Mapping[signal.Signals, _Handler]:
    """Answers SIGINT and SIGTERM, but not their echoes, by a call in the main thread, which must be the caller's.

    Args:
      respond: Takes the signal. What it raises is raised wherever the main thread is.

    Returns:
      The handlers until now.
    """
    global _answered
    _answered = time.monotonic() - ECHO_SECONDS

    def handle(number: int, frame: FrameType | None) -> None:
        global _answered
        # Handlers run in the main thread between two instructions,
        # this one included: waiting for the lock would be for ever.
        if not _answering.acquire(blocking=False):
            return  # it interrupts the answer to another
        try:
            now = time.monotonic()
            if now - _answered >= ECHO_SECONDS:
                _answered = now
                respond(signal.Signals(number))
        finally:
            _answering.release()

    return {number: signal.signal(number, handle) for number in _SIGNALS}


def interrupt(error: Interrupted) -> NoReturn:
    """Raises an error for a signal. Once one was raised, a further signal ends the command's own process at once."""
    global _raised
    if _own and _raised:
        say("ended at once, without removing temporary files")
        os._exit(error.code)
    _raised = True
    raise error


def end_on_signals() -> None:
    """Makes SIGINT and SIGTERM end this process in order: the ``jrec`` command's own, until its end."""
    global _own

    def respond(number: signal.Signals) -> None:
        interrupt(Interrupted("interrupted" if number == signal.SIGINT else "terminated", number))

    if threading.current_thread() is threading.main_thread():
        _own, ignored = True, [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        answer(respond)
        _ignore(ignored)  # as a shell starts what runs in the background of a script
        # The last of all that is done at exit: an echo that comes later still would change the exit code.
        atexit.register(_ignore, _SIGNALS)


def say(line: str) -> None:
    """Writes a line to stderr; from a signal's handler, which may interrupt a write to ``sys.stderr``."""
    with contextlib.suppress(OSError):
        os.write(2, f"{'\n' if os.isatty(2) else ''}jrec: {line}\n".encode())  # below a progress bar


def _ignore(numbers: list[signal.Signals] | tuple[signal.Signals, ...]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
