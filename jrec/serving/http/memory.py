"""How many bytes all requests together may take, from their first byte to their answer."""

from __future__ import annotations

import threading
from types import TracebackType

from jrec.serving.http.batcher import QueueFullError

DECODED = 12
"""Bytes of a body's values in Python, a byte of JSON: a list of short texts takes this much."""


class Memory:
    """Bytes that requests may take. Any thread may call it.

    Args:
      limit: The most bytes; a single request may take more where there is no other.
    """

    def __init__(self, limit: int):
        self._limit, self._taken, self._lock = limit, 0, threading.Lock()

    @property
    def taken(self) -> int:
        """Bytes that requests take now."""
        return self._taken

    def change(self, before: int, after: int) -> None:
        """A request takes ``after`` bytes from now on, instead of ``before``.

        Raises:
          QueueFullError: If all together would take too many, and it takes more than before.
        """
        with self._lock:
            rest = self._taken - before
            # To take less is never refused, nor a request that is alone: else one above the limit could never be
            # answered.
            if after > before and rest and rest + after > self._limit:
                raise QueueFullError(
                    f"requests take {rest:,} bytes already, and at most {self._limit:,} may; send the request again"
                    " later"
                )
            self._taken = rest + after


class Held:
    """The bytes of one request, given back at the end: ``with Held(memory) as held: held.now(100)``."""

    def __init__(self, memory: Memory):
        self._memory, self._bytes = memory, 0

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now(0)

    def now(self, size: int) -> None:
        """Says that the request takes ``size`` bytes from now on.

        Raises:
          QueueFullError: If all requests together would take too many.
        """
        self._memory.change(self._bytes, size)
        self._bytes = size
