"""A client that sends HTTP requests at their times, whether or not earlier ones have been answered (an open loop).

Latency counts from when a request was due, so that a server, or this client, that falls behind shows in it. Connections
are kept alive; a request that finds none idle opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back for a request.

    Attributes:
      number: The request's place among all.
      status: HTTP's; 0 where the connection failed.
      headers: By name in lower case.
      body: Bytes.
      due, sent, done: Seconds of one clock.
    """

    number: int
    status: int
    headers: dict[str, str]
    body: bytes
    due: float
    sent: float
    done: float

    @property
    def latency(self) -> float:
        """Seconds from when the request was due."""
        return self.done - self.due


class _Connections:
    """Connections to one server, the last used first."""

    def __init__(self, port: int):
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends a request; returns the answer's status, headers, and body."""
        while self._idle:  # which the server may have closed, as idle ones are after a while
            reader, writer = self._idle.pop()
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                return await self._on(reader, writer, request)
        return await self._on(*await asyncio.open_connection("127.0.0.1", self._port), request)

    async def _on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        self._idle.append((reader, writer))
        return int(head[0].split()[1]), headers, body

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def post(path: str, content: bytes, kind: str = "application/json") -> bytes:
    """The bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def fire(port: int, requests: Sequence[bytes], *, count: int, rate: float) -> list[Answer]:
    """Sends ``count`` requests, the given ones in turn, ``rate`` a second; returns all answers in order."""
    connections = _Connections(port)
    begin = time.perf_counter() + 0.1

    async def one(number: int) -> Answer:
        due = begin + number / rate
        await asyncio.sleep(due - time.perf_counter())
        sent = time.perf_counter()
        try:
            status, headers, body = await connections.ask(requests[number % len(requests)])
        except (OSError, asyncio.IncompleteReadError):
            status, headers, body = 0, {}, b""
        return Answer(
            number=number, status=status, headers=headers, body=body, due=due, sent=sent, done=time.perf_counter()
        )

    answers = await asyncio.gather(*(one(number) for number in range(count)))
    connections.close()
    return list(answers)
