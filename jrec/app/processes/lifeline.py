"""Ends a process of a run, with a one-line error, when another process has failed, was killed or has stopped.

Collectives hang where another process is gone, and JAX's own watchdog ends a process by a signal. So every process
writes a sign of life into the key-value store of JAX's coordination service each second, or its last word, and reads
what the others wrote. Threads do this; they also end the process if its main thread hangs in a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from jrec.app.processes.meeting import Role, printable
from jrec.errors import JrecError, LostProcessError

SILENCE_SECONDS = 30.0
"""Silence after which a process counts as dead, and the others end."""
SUSPECT_SECONDS = 5.0
"""The same after a collective has failed, where some process is known to be gone."""
GRACE_SECONDS = 5.0
"""How long the main thread may take to report the error itself."""
_SEND_SECONDS = 2.0  # for a last word; a stopped process 0 takes none
_KEYS = "jrec/life/"


class Store(Protocol):
    """Texts by key that all processes see, as of JAX's coordinator."""

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        """Sets a key's text."""
        ...

    def key_value_dir_get(self, key: str) -> Iterable[tuple[str, str]]:
        """The keys that begin so, with their texts."""
        ...


_SILENT = "has not answered for"


def is_lost(why: str) -> bool:
    """Whether the reason of a ``Lifeline`` is that a process went silent, and not that it ended with an error."""
    return re.match(rf"process \d+ of \d+ {_SILENT}", why) is not None


class Lifeline:
    """Watches the other processes of a run.

    Args:
      role: Which process this is.
      store: A key-value store that all processes share, with the methods of JAX's distributed client.
      silence: Seconds without a sign of life after which a process counts as dead.
      grace: Seconds that the main thread has to end by itself.
      beat: Seconds between two signs of life.
    """

    def __init__(
        self,
        role: Role,
        store: Store,
        *,
        silence: float = SILENCE_SECONDS,
        grace: float = GRACE_SECONDS,
        beat: float = 1.0,
    ):
        self._role, self._store = role, store
        self._silence, self._grace, self._beat = silence, grace, beat
        peers = [number for number in range(role.processes) if number != role.process]
        self._words = dict.fromkeys(peers, "")
        # Counted in this process's own beats: after it was stopped itself, it blames no other for that time.
        self._silent, self._unanswered = dict.fromkeys(peers, 0), 0
        self._last_word, self._said = "", ""
        self._gone: set[int] = set()
        self._lost: str | None = None
        self._losing = threading.Lock()
        self._noticed, self._leaving, self._wake = threading.Event(), threading.Event(), threading.Event()
        # Two threads: ``_talk`` may wait in the store for as long as process 0 is stopped, and ``_watch`` notices that.
        for target in (self._talk, self._watch):
            threading.Thread(target=target, name="jrec-lifeline", daemon=True).start()

    def lost(self, seconds: float = 0.0) -> str | None:
        """Which process has ended and why; None while all are alive.

        Args:
          seconds: Longest silence of a living process, from now on, if one of them is known to be gone.
        """
        if seconds:
            self._silence = min(self._silence, seconds)
            self._noticed.wait(2 * seconds)
        return self._lost

    def finish(self) -> None:
        """Tells the others that this process has finished; it goes on watching them until it exits."""
        self._say("finished")

    def fail(self, why: str) -> None:
        """Tells the others that this process ends with an error."""
        # The main thread ends by itself, so that ``_end_soon`` need not end the process.
        self._leaving.set()
        self._say(f"failed {why}")

    def leave(self) -> None:
        """Call it after an error, right before the process exits.

        Process 0 goes last, since JAX ends the others by a signal as soon as its coordinator is gone.
        """
        self._say(f"left {self._last_word.partition(' ')[2]}")
        deadline = time.monotonic() + self._grace + 2 * _SEND_SECONDS
        while self._role.process == 0 and self._stay() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.2 if self._role.process == 0 else 0.0)  # from a last word to the end

    def _stay(self) -> bool:
        return any(not self._words[number].startswith("left") for number in self._words.keys() - self._gone)

    def end(self, line: str) -> None:
        """Ends the process at once: its main thread may hang, and JAX's ways to end would wait for the others."""
        with contextlib.suppress(Exception):
            sys.stderr.write(f"jrec: error: {line}\n")
            sys.stderr.flush()
        self.leave()
        os._exit(LostProcessError.exit_code if is_lost(line) else JrecError.exit_code)

    def _say(self, word: str) -> None:
        self._last_word = word
        # ``_talk`` sends the word. Where process 0 is stopped it cannot, and this gives up after ``_SEND_SECONDS``.
        self._wake.set()
        deadline = time.monotonic() + _SEND_SECONDS
        while self._said != word and time.monotonic() < deadline:
            time.sleep(0.02)

    def _talk(self) -> None:
        """Every call to the store, which waits for as long as process 0 is stopped."""
        for beat in itertools.count():
            word = self._last_word or f"beat {beat}"
            with contextlib.suppress(RuntimeError):  # process 0 is gone, as `_watch` will see
                self._store.key_value_set(f"{_KEYS}{self._role.process}", word, allow_overwrite=True)
                self._said = word
                words = dict(self._store.key_value_dir_get(_KEYS))
                for number, before in self._words.items():
                    if (now := printable(words.get(f"{_KEYS}{number}", before))) != before:
                        self._hear(number, now)
                self._unanswered = 0
            self._wake.wait(self._beat)
            self._wake.clear()

    def _hear(self, number: int, word: str) -> None:
        self._words[number], self._silent[number] = word, 0
        kind, _, why = word.partition(" ")
        if kind in ("failed", "left"):
            # Where that process was ended by the loss of another one, its reason names that one.
            own = not re.match(r"process \d+ of \d+ ", why)
            self._lose(self._of(number, f"ended with an error: {why}") if own else why)

    def _watch(self) -> None:
        while True:
            time.sleep(self._beat)
            self._unanswered += 1
            for number, word in self._words.items():
                self._silent[number] += 1
                # A process that has finished or left says no more.
                if self._silent[number] * self._beat > self._silence and not word.startswith(("finished", "left")):
                    # Where process 0 is stopped, nobody's signs of life arrive.
                    # A store that has not answered for half of the limit tells that case.
                    stopped = 2 * self._unanswered * self._beat > self._silence and self._role.process
                    self._give_up(0 if stopped else number)

    def _give_up(self, number: int) -> None:
        self._gone.add(number)
        self._lose(self._of(number, f"{_SILENT} {self._silence:g} s, as a killed or stopped one does"))

    def _of(self, number: int, predicate: str) -> str:
        return f"process {number} of {self._role.processes} {predicate}"

    def _lose(self, why: str) -> None:
        # Both threads come here. The first reason stands: later ones, such as silence, follow from it.
        with self._losing:
            if self._lost is not None:
                return
            self._lost = why
        self._noticed.set()
        # In a thread of its own, since ``end`` waits for ``_talk`` to send the last word.
        threading.Thread(target=self._end_soon, args=(why,), daemon=True).start()

    def _end_soon(self, why: str) -> None:
        if not self._leaving.wait(self._grace):
            self._last_word = f"failed {why}"
            self.end(
                f"{why}, so this one, process {self._role.process}, ends too; look at the output of the other. --resume"
                " goes on from the last checkpoint, with mesh.devices=N also on fewer devices"
            )
