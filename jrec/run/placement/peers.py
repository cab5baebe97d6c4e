"""Exchanges of arrays in host memory between the processes of a run, by plain sockets between every two of them.

A device collective has to be dispatched in the same order in every process, by one thread. Threads that prepare batches
ahead of their steps exchange data this way instead: it needs no device and waits for no step. Every process takes part
in every round of an exchange, and rounds are numbered, so that two processes that are out of step fail instead of
reading each other's earlier messages.

JAX has two other ways, which do not serve here. Values of its coordination service all pass through one process, and
take tens of times as long. ``jax.experimental.transfer`` takes no longer than a few of these exchanges, but has no
token: what any program sends to its port is parsed, and bytes that it does not know end the process.
"""

from __future__ import annotations

import itertools
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jrec.errors import ProcessError
from jrec.run.addresses import family_of, own_address
from jrec.run.processes import coordinator_host, key_values, published

CONNECT_SECONDS = 60.0
"""How long the others may take to connect: they are at the same point, but their disks may be slower."""
_HELLO_SECONDS = 5.0  # for a connection's first bytes, which a process sends at once
_CALLS = itertools.count()  # equal in all processes, which connect at the same points of the program
_LOOK_SECONDS = 0.5  # how often a wait checks whether it was closed
_HEADER = struct.Struct("<QQ")  # round, bytes that follow
_HELLO = struct.Struct("<16sQQ")  # token, process, number of the exchange
_DTYPES = (np.dtype("<i4"), np.dtype("<i8"))


class Closed(Exception):  # noqa: N818, a message to threads
    """The exchange was closed while another thread waited in it."""


class Peers:
    """An exchange between all processes. Use it from one thread; any other may close it.

    Args:
      process: The number of this process.
      connections: Connections to the other processes, by process.
    """

    def __init__(self, process: int, connections: Mapping[int, socket.socket]):
        self.process, self.processes = process, len(connections) + 1
        self._connections = dict(connections)
        self._round, self._closed = 0, False
        for connection in self._connections.values():
            # Never blocked in a call: a wait is in the selector, which looks every half a second whether it was closed.
            connection.setblocking(False)

    def exchange(self, arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Sends arrays to every process, and returns the arrays that they sent to this one, by process.

        Args:
          arrays: By process, including this one, any number of one-dimensional arrays of int32 or int64.

        Raises:
          ProcessError: If another process has ended, or is at another round.
          Closed: If this exchange was closed.
        """
        if len(arrays) != self.processes:
            raise ValueError(f"{len(arrays)} messages for {self.processes} processes")
        out = {p: memoryview(_encoded(self._round, arrays[p])) for p in self._connections}
        into = {p: _Frame() for p in self._connections}
        try:
            self._transfer(out, into)
        except (ValueError, KeyError, OSError) as error:  # the errors of a closed socket
            if self._closed:
                raise Closed from error
            raise
        for p, frame in into.items():
            if frame.round != self._round:
                raise ProcessError(
                    f"process {p} is at round {frame.round:,} of an exchange, but this one, process {self.process}, at"
                    f" round {self._round:,}: they do not read the same batches"
                )
        self._round += 1
        return [_decoded(into[p].content) if p in into else list(arrays[p]) for p in range(self.processes)]

    def most(self, counts: np.ndarray) -> np.ndarray:
        """The elementwise maximum of all processes' counts, int32 or int64 of one shape."""
        counts_of_all = self.exchange([[counts.reshape(-1)]] * self.processes)
        return np.max([array for (array,) in counts_of_all], axis=0).reshape(counts.shape)

    def close(self) -> None:
        """Ends the exchange, even while a thread waits in it."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()

    def _transfer(self, out: dict[int, memoryview], into: dict[int, _Frame]) -> None:
        # Sends and receives by turns, as either is possible: if all sent first, full socket buffers would block them
        # all.
        with selectors.DefaultSelector() as selector:
            for p, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, p)
            while selector.get_map():
                if self._closed:
                    raise Closed
                for key, events in selector.select(_LOOK_SECONDS):
                    self._advance(key.data, events, out, into)
                    wanted = selectors.EVENT_READ * (not into[key.data].complete)
                    wanted |= selectors.EVENT_WRITE * bool(out[key.data])
                    if wanted:
                        selector.modify(key.fileobj, wanted, key.data)
                    else:
                        selector.unregister(key.fileobj)

    def _advance(self, p: int, events: int, out: dict[int, memoryview], into: dict[int, _Frame]) -> None:
        try:
            if events & selectors.EVENT_WRITE and out[p]:
                out[p] = out[p][self._connections[p].send(out[p]) :]
            if events & selectors.EVENT_READ and not into[p].complete:
                into[p].receive(self._connections[p])
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            if self._closed:
                raise Closed from error
            raise ProcessError(
                f"process {p} of {self.processes} ended while batches were prepared; look at its output"
            ) from error


class _Frame:
    """A message that is being received: its header, then the content that the header announces."""

    def __init__(self) -> None:
        self.round, self.complete, self.content = -1, False, bytearray(_HEADER.size)
        self._filled, self._in_header = 0, True

    def receive(self, connection: socket.socket) -> None:
        """Receives the bytes that have arrived, but none of the next message."""
        # At most to the end of this message: what follows belongs to the next round, and stays in the socket.
        count = connection.recv_into(memoryview(self.content)[self._filled :])
        if not count:
            raise EOFError
        self._filled += count
        if self._filled == len(self.content) and self._in_header:
            self.round, size = _HEADER.unpack(self.content)
            self.content, self._filled, self._in_header = bytearray(size), 0, False
        self.complete = not self._in_header and self._filled == len(self.content)


def _encoded(number: int, arrays: Sequence[np.ndarray]) -> bytes:
    # Little-endian by name: the processes of a run may be on unlike machines.
    sizes = np.array([[_DTYPES.index(array.dtype), array.size] for array in arrays], "<i8").reshape(-1, 2)
    parts = [np.int64(len(arrays)).tobytes(), sizes.tobytes(), *(np.ascontiguousarray(a).tobytes() for a in arrays)]
    return b"".join([_HEADER.pack(number, sum(map(len, parts))), *parts])


def _decoded(content: bytearray) -> list[np.ndarray]:
    (count,) = np.frombuffer(content, "<i8", 1)
    sizes, at, arrays = np.frombuffer(content, "<i8", 2 * int(count), 8).reshape(-1, 2), 8 + 16 * int(count), []
    for kind, size in sizes:
        arrays.append(np.frombuffer(content, _DTYPES[kind], int(size), at))
        at += arrays[-1].nbytes
    return arrays


def connect(count: int, *, wait: float = CONNECT_SECONDS) -> tuple[Peers, ...]:
    """Connects ``count`` exchanges between all of JAX's processes; all call it at the same point of the program.

    Processes tell each other where they listen, and the token without which they refuse a connection, by JAX's
    coordination service.

    Args:
      count: The number of exchanges; a separate thread may use each.
      wait: Seconds that the others may take to connect.

    Raises:
      ProcessError: If a process cannot be reached.
    """
    process, processes = jax.process_index(), jax.process_count()
    coordinator, keys, store = coordinator_host(), f"jrec/peers/{next(_CALLS)}", key_values()
    own = own_address()
    if process == 0:
        store.key_value_set(f"{keys}/token", secrets.token_hex(16))
    # Listening before the address is published: whoever reads it can connect.
    with _listen(own, backlog=count * processes) as listener:
        address, port = listener.getsockname()[:2]
        # Where another machine forwards to process 0, the others have to ask that one.
        reached = own if process or address == own else coordinator
        store.key_value_set(f"{keys}/{process}", f"{port} {reached}")
        token = bytes.fromhex(published(f"{keys}/token", wait))
        connections: dict[tuple[int, int], socket.socket] = {}
        try:
            # Later processes connect to earlier ones, which listen: one connection for each two processes and exchange.
            for other in range(process):
                port, _, host = published(f"{keys}/{other}", wait).partition(" ")
                for number in range(count):
                    hello = _HELLO.pack(token, process, number)
                    connections[other, number] = _to((host, int(port)), hello, other, wait)
            awaited = {(p, n) for p in range(process + 1, processes) for n in range(count)}
            _accept(listener, token, awaited, connections, wait)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
    other_processes = [p for p in range(processes) if p != process]
    return tuple(Peers(process, {p: connections[p, number] for p in other_processes}) for number in range(count))


def _listen(address: str, *, backlog: int) -> socket.socket:
    """Listens only at the address by which the others come, at any free port."""
    try:
        return socket.create_server((address, 0), family=family_of(address), backlog=backlog)
    except OSError:  # an address that another machine forwards to this one, as a cluster's service does
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=backlog)


def _to(place: tuple[str, int], hello: bytes, other: int, wait: float) -> socket.socket:
    try:
        connection = socket.create_connection(place, timeout=wait)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(hello)
    except OSError as error:
        raise ProcessError(
            f"process {other} was not reached at {place[0]}:{place[1]} ({error.strerror or error}), where it takes rows"
            " of host memory that this one asks for; let the processes' machines reach each other at all ports"
        ) from error
    return connection


def _accept(
    listener: socket.socket,
    token: bytes,
    awaited: set[tuple[int, int]],
    connections: dict[tuple[int, int], socket.socket],
    wait: float,
) -> None:
    """Accepts the connections of later processes; refuses programs that do not know the token."""
    deadline = time.monotonic() + wait
    while missing := awaited - connections.keys():
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise ProcessError(
                f"process {min(missing)[0]} did not connect to port {listener.getsockname()[1]} of this one within"
                f" {wait:g} s; let the processes' machines reach each other at all ports, and look at its output"
            ) from error
        said = _received(connection, _HELLO.size, _HELLO_SECONDS)
        sent_token, process, number = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1, -1)
        # Whoever finds the port may connect; only processes of this run know the token.
        if not secrets.compare_digest(sent_token, token) or (process, number) not in missing:
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections[process, number] = connection


def _received(connection: socket.socket, size: int, seconds: float) -> bytes:
    """The first ``size`` bytes of a connection; fewer where it ends, or does not send them within ``seconds``."""
    # A socket with a timeout does not wait for all of them, whatever MSG_WAITALL asks for.
    deadline, content = time.monotonic() + seconds, b""
    while len(content) < size and (remaining := deadline - time.monotonic()) > 0:
        connection.settimeout(remaining)
        try:
            part = connection.recv(size - len(content))
        except OSError:
            break
        if not part:
            break
        content += part
    return content
