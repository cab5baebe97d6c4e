"""Clients of bad will, for ``benchmarks.serve_load --hostile``: each does one thing that a server must bear, for ever.

They run in a process of their own, so that what they take from Python is not taken from the good client: ``python -m
benchmarks.hostile_clients PORT ROWS``, of which ROWS is a JSON file of good rows, prints what came back on SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.open_loop import post

BIG = 8 << 20  # bytes: jrec serve's own bound of a body


class Hostile:
    """Runs hostile clients against a server until it is cancelled.

    Args:
      port: The server's, on loopback.
      rows: Good rows, which bad ones are made of.

    Attributes:
      answers: How often each status came back, 0 where the connection was closed.
      healthz: Seconds that each probe of ``/healthz`` took, one every 100 ms.
    """

    def __init__(self, port: int, rows: Sequence[dict[str, str]]):
        self._port, self._rows, self._random = port, rows, random.Random(0)
        self.answers: Counter[int] = Counter()
        self.healthz: list[float] = []
        texts, numbers = {**rows[0], "C1": "x" * (BIG - 4096)}, {**rows[0], "C1": [1] * (BIG // 3 - 4096)}
        self._big = [post("/predict", json.dumps({"rows": [row]}).encode()) for row in (texts, numbers)]

    async def run(self) -> None:
        """Never returns."""
        clients: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._bad_row, 0.05), (self._bad_row, 0.05), (self._random_bytes, 0.1), (self._deep, 0.5),
            (self._big_body, 0.5), (self._too_big, 0.5), (self._half, 0.2), (self._leaver, 0.05),
            (self._long_headers, 0.5), (self._foreign_host, 0.5), (self._probe, 0.1),
            *((self._slow, 1.0) for _ in range(40)),
        ]  # fmt: skip

        async def again(client: Callable[[], Awaitable[None]], pause: float) -> None:
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await client()
                await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))

        await asyncio.gather(*(again(*client) for client in clients))

    async def _ask(self, request: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            with contextlib.suppress(ConnectionError):  # an early answer closes the connection
                writer.write(request)
                await writer.drain()
            head = await reader.read(4096)
            status = int(head.split()[1]) if head.startswith(b"HTTP") else 0
        finally:
            writer.close()
        self.answers[status] += 1
        return status

    async def _bad_row(self) -> None:
        row = {**self._random.choice(self._rows)}
        column = self._random.choice([*row])
        wrong = [{"a": 1}, [[1]], "no number at all", 1e300, None, "\x00"]
        rows = [*self._rows[:7], {**row, column: self._random.choice(wrong)}]
        await self._ask(post("/predict", json.dumps({"rows": rows}).encode()))

    async def _random_bytes(self) -> None:
        await self._ask(self._random.randbytes(self._random.randrange(1, 2000)) + b"\r\n\r\n")

    async def _deep(self) -> None:
        await self._ask(post("/predict", b'{"rows": ' + b"[" * 100_000))

    async def _big_body(self) -> None:
        await self._ask(self._random.choice(self._big))

    async def _too_big(self) -> None:
        await self._ask(post("/predict", b" " * (BIG + 1)))

    async def _half(self) -> None:
        """Says that a body comes, sends half of it, and leaves."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        content = json.dumps({"rows": list(self._rows)}).encode()
        writer.write(post("/predict", content)[: len(content) // 2])
        await writer.drain()
        await asyncio.sleep(0.5)
        writer.close()

    async def _leaver(self) -> None:
        """Asks, and does not wait for the answer."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(post("/predict", json.dumps({"rows": list(self._rows[:4])}).encode()))
        await writer.drain()
        writer.close()

    async def _slow(self) -> None:
        """A byte of a header every second."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            for byte in b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 100:
                writer.write(bytes([byte]))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    if not await asyncio.wait_for(reader.read(1), 1.0):
                        break
        finally:
            writer.close()

    async def _long_headers(self) -> None:
        await self._ask(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"y" * 300_000 + b"\r\n\r\n")

    async def _foreign_host(self) -> None:
        await self._ask(b"POST /reload HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n")

    async def _probe(self) -> None:
        begin = time.perf_counter()
        if await self._ask(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == 200:
            self.healthz.append(time.perf_counter() - begin)


async def _main(port: int, rows: Sequence[dict[str, str]]) -> Hostile:
    hostile = Hostile(port, rows)
    running = asyncio.create_task(hostile.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return hostile


if __name__ == "__main__":
    found = asyncio.run(_main(int(sys.argv[1]), json.loads(pathlib.Path(sys.argv[2]).read_text())))
    print(json.dumps({"answers": found.answers, "healthz": found.healthz}))
