"""Stopping a run between two steps, so that its checkpoint is complete."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from jrec import signals


class StopRequest:
    """Whether someone asked the run to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a request that the loop sees, and says so; a further one gives the run up.

    A further one is no echo of the first (``jrec.signals.ECHO_SECONDS``); it raises KeyboardInterrupt wherever the run
    is. Outside the main thread, where Python cannot handle signals, the request is never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def respond(number: signal.Signals) -> None:
        # ``signals.answer`` has dropped echoes of the first signal, so whoever sends this one means it.
        if request:
            lost = "interrupted without a checkpoint of the last steps; --resume goes on from the last complete one"
            signals.interrupt(signals.Interrupted(lost))
        request.signal = number
        signals.say(
            f"{number.name}: stopping after the current step or evaluation, with a checkpoint; one more, in"
            f" {signals.ECHO_SECONDS:g} seconds or later, gives that up"
        )

    previous = signals.answer(respond)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
