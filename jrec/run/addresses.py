"""Where the processes of a run reach each other: on the way to process 0, whatever their machines call themselves."""

from __future__ import annotations

import functools
import ipaddress
import socket

from jrec.run.processes import coordinator_host, joined, key_values, published

_WAIT_SECONDS = 60.0  # for the others, which are at the same point of the program


@functools.cache
def own_address() -> str:
    """The address of this process for the others. All processes call it, at the same point of the program.

    A machine's name does not tell it: on many it leads to 127.0.1.1, which no other machine reaches. Here it is that of
    the interface by which the process reaches process 0, and of process 0 the one by which the others come.

    Returns:
      An IPv4 or IPv6 address. That of process 0 may be another machine's, which forwards to it.

    Raises:
      ProcessError: If another process does not say how it reaches process 0.
    """
    process, store = joined().process_id, key_values()
    own, first = _route(coordinator_host())
    if process:
        store.key_value_set(f"jrec/addresses/{process}", first)
        # On process 0's machine the way there may not leave the machine, and says nothing of how others come.
        return published("jrec/addresses/0", _WAIT_SECONDS) if is_local(own) else own
    ways = [published(f"jrec/addresses/{other}", _WAIT_SECONDS) for other in range(1, joined().num_processes)]
    address = next((way for way in ways if not is_local(way)), first)
    store.key_value_set("jrec/addresses/0", address)
    return address


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address's sockets."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_local(address: str) -> bool:
    """Whether only programs of the same machine reach an address."""
    return ipaddress.ip_address(address).is_loopback


def _route(host: str) -> tuple[str, str]:
    """The addresses of this machine and of a host's on the way from one to the other; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]), str(address[0])
