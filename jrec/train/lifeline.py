"""Ends a process of a run, with a one-line error, when another process has ended or stopped.

Collectives hang where another process is stopped, and JAX's own watchdog ends a process by a signal. So the connections
of ``jrec.train.meeting`` stay open: each side sends a sign of life every other second. Process 0 hears all, and tells
the others. A separate thread ends the process if the main thread does not, which may hang in a collective.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable

from jrec.train.meeting import Meeting

SILENCE_SECONDS = 30.0
"""Silence after which a process counts as dead, and the others end."""
GRACE_SECONDS = 5.0
"""How long the main thread may take to report the error itself."""
_BEAT_SECONDS = 2.0
_SEND_SECONDS = 5.0  # for a few bytes to a buffer that only a stopped process lets fill up


class Lifeline:
    """Watches the other processes of a run.

    Args:
      meeting: The processes.
      silence: Seconds without a sign of life after which a process counts as dead.
      grace: Seconds that the main thread has to end by itself.
      end: Prints a line and ends the process; tests replace it.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        silence: float = SILENCE_SECONDS,
        grace: float = GRACE_SECONDS,
        end: Callable[[str], None] | None = None,
    ):
        self._role, self._lines = meeting.role, dict(meeting.lines)
        self._silence, self._grace, self._end = silence, grace, end or _end
        for line in self._lines.values():
            line.socket.settimeout(_SEND_SECONDS)
        self._heard = dict.fromkeys(self._lines, time.monotonic())
        self._ended: set[int] = set()  # processes that said that they are through
        self._lost: dict[int, str] = {}
        self._noticed, self._leaving = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jrec-lifeline", daemon=True)
        self._thread.start()

    def lost(self, seconds: float = 0.0) -> str | None:
        """Which process has ended and why, after at most ``seconds`` of waiting; None while all are alive."""
        self._noticed.wait(seconds)
        return next(iter(self._lost.values()), None)

    def finish(self) -> None:
        """Tells the others that this process has finished; it goes on watching them until it exits."""
        self._send({"end": None})

    def fail(self, why: str) -> None:
        """Tells the others that this process ends with an error.

        Process 0 goes last, since JAX ends the others by a signal as soon as its coordinator is gone.
        """
        self._leaving.set()
        self._send({"end": why})
        if self._role.process == 0:
            deadline = time.monotonic() + self._grace + 2.0
            while self._lines.keys() - self._lost.keys() and time.monotonic() < deadline:
                time.sleep(0.05)

    def _send(self, message: dict[str, object]) -> None:
        for line in list(self._lines.values()):
            line.send(message)

    def _watch(self) -> None:
        beat = 0.0
        while self._lines:
            for number in self._readable(0.5):
                self._hear(number)
            now = time.monotonic()
            if now - beat >= _BEAT_SECONDS:
                self._send({"beat": True})
                beat = now
            for number in list(self._lines):
                if now - self._heard[number] > self._silence:
                    self._lose(number, f"has not answered for {self._silence:g} s")

    def _readable(self, seconds: float) -> list[int]:
        by_socket = {line.socket: number for number, line in self._lines.items()}
        try:
            ready, _, _ = select.select(list(by_socket), [], [], seconds)
        except (ValueError, OSError):  # one was closed here meanwhile: nobody listens on it any more
            self._lines = {n: line for n, line in self._lines.items() if line.socket.fileno() >= 0}
            return []
        return [by_socket[socket] for socket in ready]

    def _hear(self, number: int) -> None:
        try:
            messages = self._lines[number].waiting()
        except (EOFError, ValueError, OSError):
            ended = number in self._ended
            self._drop(number)
            if not ended:
                self._lose(number, "has ended without a word, as a killed one does")
            return
        self._heard[number] = time.monotonic()
        for message in messages:
            if "lost" in message:
                self._lose(int(message["lost"]), str(message["why"]))
            elif "end" in message:
                self._ended.add(number)
                if (why := message["end"]) is not None:
                    self._lose(number, f"ended with an error: {why}")

    def _drop(self, number: int) -> None:
        if (line := self._lines.pop(number, None)) is not None:
            line.close()

    def _lose(self, number: int, why: str) -> None:
        if self._lost:
            self._lost.setdefault(number, why)
            return
        first = f"process {number} of {self._role.processes} {why}"
        self._lost[number] = first
        self._noticed.set()
        if self._role.process == 0:
            for other, line in self._lines.items():
                if other != number:
                    line.send({"lost": number, "why": why})
        # A killed process 0 takes JAX's coordinator with it, which then ends this process by a signal: be quicker.
        hurry = number == 0 and number not in self._lines
        threading.Thread(target=self._end_soon, args=(first, 0.0 if hurry else self._grace), daemon=True).start()

    def _end_soon(self, why: str, grace: float) -> None:
        if not self._leaving.wait(grace):
            self._end(
                f"{why}, so this one, process {self._role.process}, ends too; look at the output of the other. --resume"
                " goes on from the last checkpoint, with mesh.devices=N also on fewer devices"
            )


def _end(line: str) -> None:
    """Ends the process at once: its main thread may hang, and JAX's ways to end would wait for the others."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"jrec: error: {line}\n")
        sys.stderr.flush()
    os._exit(2)
