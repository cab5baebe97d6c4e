"""Processes of one run find each other and compare their configurations, over plain sockets, before JAX starts.

JAX's own coordinator ends a process by a signal if its port is taken or a process does not come. So process 0 listens
at the coordinator's port first. Every other process sends its number and its *facts* (``jrec.train.same_run``), and
gets the answer when all have come: go on, or the reason not to. The connections stay for ``jrec.train.lifeline``; the
port is released for JAX's coordinator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jrec.errors import ConfigError, ProcessError

_HELLO_SECONDS = 10.0
"""How long a connection may take to send its first message."""
_TELL_SECONDS = 20.0
"""How long a process that cannot start waits for the others, to tell them."""
_MOST_BYTES = 1 << 22
_MOST_DIFFERENCES = 5
_ABSENT = "not set"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Which process this is, and where process 0 listens.

    Attributes:
      host, port: Process 0's address.
      processes: The number of processes.
      process: This process's number, from 0.
    """

    host: str
    port: int
    processes: int
    process: int

    @staticmethod
    def of(coordinator: str, processes: int, process: int) -> Role:
        """The role of process ``process`` of ``processes``, with process 0 at HOST:PORT.

        Raises:
          ConfigError: If the address is not HOST:PORT, or there is no such process.
        """
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"--coordinator is {coordinator!r}; give HOST:PORT, such as localhost:7000")
        if processes < 1:
            raise ConfigError(f"--processes is {processes}; give the number of all processes, at least 1")
        if not 0 <= process < processes:
            raise ConfigError(
                f"--process is {process}; processes are numbered from 0 to --processes - 1 = {processes - 1}"
            )
        return Role(host=host.strip("[]"), port=int(port), processes=processes, process=process)

    @property
    def address(self) -> str:
        """Process 0's address as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Line:
    """A connection that carries JSON objects, one per line."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._buffer = b""
        self._sending = threading.Lock()  # the main thread and the lifeline's both send

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message; does nothing if the other process is gone."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Any:
        """The next message, within ``seconds``.

        Raises:
          TimeoutError: If none came.
          EOFError: If the other side has closed.
          ValueError: If the received bytes are no message.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._read()
        return self._next()

    def waiting(self) -> list[Any]:
        """All messages that have arrived, once the socket is readable.

        Raises:
          EOFError: If the other side has closed and nothing is left.
          ValueError: If the received bytes are no message.
        """
        self._read()
        messages = []
        while b"\n" in self._buffer:
            messages.append(self._next())
        return messages

    def _read(self) -> None:
        try:
            came = self.socket.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error
        if not came:
            raise EOFError
        self._buffer += came
        if len(self._buffer) > _MOST_BYTES or not self._buffer.startswith(b"{"):
            raise ValueError("no message of jrec")

    def _next(self) -> Any:
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message of jrec")
        return message

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()


@dataclasses.dataclass(kw_only=True)
class Meeting:
    """Processes that have met.

    Attributes:
      role: Which process this is.
      lines: Connections by process: in process 0 to all others, in the others to process 0.
    """

    role: Role
    lines: dict[int, Line]
    _listener: socket.socket | None = None

    def free_port(self) -> None:
        """Releases the port. Call it right before JAX's coordinator takes it."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def meet(role: Role, facts: Mapping[str, str], *, refusal: str | None = None, wait: float = 300.0) -> Meeting:
    """Waits until all processes of the run are here, and compares their facts.

    Args:
      role: Which process this is.
      facts: Values that must be equal in all processes, as text by name.
      refusal: Why this process cannot start, to tell the others; None if it can.
      wait: Seconds within which all must come.

    Raises:
      ConfigError: In all processes, if facts differ, a process refused, or not all came.
      ProcessError: If the port is taken, or process 0 cannot be reached.
    """
    if refusal is not None:
        wait = min(wait, _TELL_SECONDS)
    hello = {"jrec": 1, "process": role.process, "processes": role.processes, "facts": dict(facts), "refusal": refusal}
    return _host(role, hello, wait) if role.process == 0 else _guest(role, hello, wait)


def _host(role: Role, hello: dict[str, Any], wait: float) -> Meeting:
    listener = _listen(role)
    lines: dict[int, Line] = {}
    hellos: dict[int, dict[str, Any]] = {0: hello}
    deadline = time.monotonic() + wait
    wrong: str | None = None
    try:
        while len(hellos) < role.processes and wrong is None and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                wrong = _welcome(role, Line(listener.accept()[0]), lines, hellos)
            if wrong is None and any(said["refusal"] for said in hellos.values()):
                deadline = min(deadline, time.monotonic() + _TELL_SECONDS)
        refused = wrong or _refused(role, hellos) or _absent(role, hellos, wait)
        refused = refused or differences([hellos[number]["facts"] for number in range(role.processes)])
        for line in lines.values():
            line.send({"go": refused is None, "refused": refused})
        if refused is not None:
            raise ConfigError(refused)
    except BaseException:
        listener.close()
        for line in lines.values():
            line.close()
        raise
    return Meeting(role=role, lines=lines, _listener=listener)


def _listen(role: Role) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", role.port), family=family, dualstack_ipv6=both, backlog=128)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "another program uses that port" if taken else error.strerror or str(error)
        raise ProcessError(
            f"process 0 cannot listen at port {role.port} of --coordinator {role.address}: {why}; choose another port,"
            " the same for all processes"
        ) from error


def _welcome(role: Role, line: Line, lines: dict[int, Line], hellos: dict[int, dict[str, Any]]) -> str | None:
    """Accepts a process, or returns the reason not to."""
    try:
        said = line.receive(_HELLO_SECONDS)
        number, count = int(said["process"]), int(said["processes"])
        said["refusal"], said["facts"] = said.get("refusal"), dict(said["facts"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):  # a program that is no process of a run
        line.close()
        return None
    wrong = None
    if count != role.processes:
        wrong = f"--processes is {role.processes} in process 0 and {count} in process {number}; give all the same"
    elif number in hellos or not 0 < number < role.processes:
        wrong = f"two processes were started with --process {number}; number them from 0 to {role.processes - 1}"
    if wrong is not None:
        line.send({"go": False, "refused": wrong})
        line.close()
        return wrong
    lines[number], hellos[number] = line, said
    return None


def _refused(role: Role, hellos: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first refusing process and its reason; None if none refuses."""
    for number in sorted(hellos):
        if (why := hellos[number]["refusal"]) is not None:
            return f"process {number} of {role.processes} cannot start: {why}"
    return None


def _absent(role: Role, hellos: Mapping[int, Any], wait: float) -> str | None:
    missing = [str(number) for number in range(role.processes) if number not in hellos]
    if not missing:
        return None
    return (
        f"process(es) {', '.join(missing)} of {role.processes} did not come to {role.address} within {wait:g} s; start"
        " all of them at about the same time, or look at their output"
    )


def _guest(role: Role, hello: dict[str, Any], wait: float) -> Meeting:
    line = _connect(role, wait)
    try:
        line.send(hello)
        refused = _answer(role, line, wait)
        if refused is not None:
            raise ConfigError(refused)
    except BaseException:
        line.close()
        raise
    return Meeting(role=role, lines={0: line})


def _answer(role: Role, line: Line, wait: float) -> str | None:
    """Why process 0 refuses, or None where all go on."""
    try:
        answer = line.receive(wait + _HELLO_SECONDS)
        return None if answer["go"] else str(answer["refused"])
    except TimeoutError as error:
        raise ProcessError(
            f"process 0 at {role.address} did not answer within {wait:g} s; look at its output"
        ) from error
    except EOFError as error:
        raise ProcessError(
            f"process 0 at {role.address} ended before all processes had come, or another program has that port; look"
            " at its output, or choose another port for --coordinator"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ProcessError(
            f"what listens at {role.address} is no process 0 of a run: another program uses that port; choose another"
            " one for --coordinator, the same for all processes"
        ) from error


def _connect(role: Role, wait: float) -> Line:
    deadline = time.monotonic() + wait
    while True:
        try:
            connection = socket.create_connection((role.host, role.port), timeout=max(0.1, deadline - time.monotonic()))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Line(connection)
        except socket.gaierror as error:
            raise ConfigError(
                f"--coordinator is {role.address}, but there is no host {role.host!r} ({error.strerror}); give the name"
                " or the number of process 0's machine"
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"process 0 was not reached at {role.address} within {wait:g} s ({error.strerror or error}); start"
                    " it, or give its address by --coordinator"
                ) from error
            time.sleep(0.1)


def differences(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Which facts differ, with their values and the processes that have them; None if all agree.

    Args:
      facts: By process, values as text by name.
    """
    names = dict.fromkeys(name for of_process in facts for name in of_process)
    different = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, of_process in enumerate(facts):
            holders.setdefault(of_process.get(name, _ABSENT), []).append(process)
        if len(holders) > 1:
            said = [f"{value} in process {', '.join(map(str, where))}" for value, where in holders.items()]
            different.append(f"{name} is {' and '.join(said)}")
    if not different:
        return None
    more = len(different) - _MOST_DIFFERENCES
    listed = "; ".join(different[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return f"the processes would not train one model: {listed}. Start all of them alike, with the same data"
