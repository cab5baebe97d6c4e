"""A server takes over a delta: what fails leaves the old scores, and the delta is taken when it is asked for again."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import pathlib
import socket
import threading

from apply_delta import COLUMNS

from jrec.errors import JrecError
from jrec.outputs import sync
from jrec.serving.http.app import Options
from jrec.serving.http.batcher import Limits
from jrec.serving.http.follower import Follower
from jrec.serving.http.process import http_server, make, ready_model

DELTA, DELTAS = pathlib.Path("delta"), pathlib.Path("deltas")


def main() -> int:
    """Serves as ``jrec serve export --deltas deltas --poll 0`` until the delta is taken; leaves the last scores."""
    try:
        DELTAS.mkdir(exist_ok=True)
        load = functools.partial(ready_model, check=True, batch_rows=4, threads=1)
        follower = Follower(pathlib.Path("export"), DELTAS, load=load)
        limits, options = Limits(batch_rows=4, delay=0, queue_rows=9), Options(max_rows=4, max_bytes=9999, poll=0)
        server = http_server(make(follower, limits, options), grace=20)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            asking = _Asking(listening.getsockname()[1])
            thread = threading.Thread(target=asking.run, args=(lambda: setattr(server, "should_exit", True),))
            thread.start()
            server.run(sockets=[listening])
        thread.join()
    except (JrecError, OSError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        print("jrec: interrupted" if interrupted else f"jrec: error: {error}")
        return 130 if interrupted else 2
    if asking.scores is None:
        return 130  # a signal ended the server before
    pathlib.Path("said").write_text(json.dumps(asking.scores))
    return 2 if asking.failed else 0


class _Asking:
    """A client.

    Attributes:
      scores: The answer after the delta; None where the server ended before.
      failed: Whether it was not taken over at once.
    """

    def __init__(self, port: int):
        self._port = port
        self.scores, self.failed = None, False

    def run(self, end) -> None:
        """Asks for scores, brings the delta, and asks to take it over until that is done."""
        try:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                self._follow()
        finally:
            end()

    def _follow(self) -> None:
        before = self._ask("/predict")
        if DELTA.exists():
            DELTA.rename(DELTAS / "1")
            sync(DELTAS)
            while "error" in (answer := self._ask("/reload")) or answer["passed_over"]:
                print(f"jrec: error: {answer.get('error') or answer['passed_over']}")
                self.failed = True
                assert self._ask("/predict") == before, "a third model"
        self.scores = self._ask("/predict")

    def _ask(self, path: str) -> dict:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("POST", path, json.dumps({"columns": COLUMNS}), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
