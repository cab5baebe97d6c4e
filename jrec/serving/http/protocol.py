"""Connections of anybody: not too many, with headers that are not too long and come in time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What connections may be.

    Attributes:
      connections: The most that are open at once.
      header_bytes: The most bytes of a request's headers, up to what comes at one time.
      header_seconds: How long a request's headers may take, from the beginning of the connection or of the headers.
    """

    connections: int = 1_000
    header_bytes: int = 64 << 10
    header_seconds: float = 10.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which refuses what is beyond the limits and closes the connection then."""

    def __init__(self, limits: ConnectionLimits, **options: object):
        super().__init__(**options)  # pyright: ignore[reportArgumentType]
        self._limits, self._refused = limits, False
        self._headers = self._received = 0  # how many were complete, and the bytes of those that are not
        self._in_headers = True
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes a connection, or answers 503 where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(b"503 Service Unavailable", b"Retry-After: 1\r\n", "too many connections are open")
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads what came, unless the connection was refused."""
        if self._refused:
            return
        if self._in_headers and self._clock is None:  # of a further request
            self._await_headers()
        before = self._in_headers, self._headers
        super().data_received(data)
        # Only bytes of headers that no request completed: a body, or a further request in the same piece, begins anew.
        goes_on = self._in_headers and before == (True, self._headers)
        self._received = self._received + len(data) if goes_on else 0
        if self._received > self._limits.header_bytes and not self._refused:
            most = self._limits.header_bytes
            self._refuse(b"431 Request Header Fields Too Large", b"", f"headers have more than {most:,} bytes")

    def on_headers_complete(self) -> None:
        """Lets the application begin."""
        self._in_headers = False
        self._headers += 1
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Waits for the next request's headers."""
        super().on_message_complete()
        self._in_headers = True

    def _await_headers(self) -> None:
        seconds = self._limits.header_seconds
        late = functools.partial(
            self._refuse, b"408 Request Timeout", b"", f"the headers did not come within {seconds:g} s"
        )
        self._clock = self.loop.call_later(seconds, late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _refuse(self, status: bytes, headers: bytes, message: str) -> None:
        self._refused = True
        self._stop_clock()
        if self.transport.is_closing():
            return
        text = message.encode()
        length = str(len(text)).encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\nContent-Type: text/plain\r\n%sContent-Length: %s\r\nConnection: close\r\n\r\n%s"
            % (status, headers, length, text)
        )
        self.transport.close()
