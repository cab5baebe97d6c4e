"""Two hosts on one machine, for tests: network namespaces with addresses of their own, joined by a cable."""

import contextlib
import os
import pathlib
import shutil
import subprocess

FIRST = "10.201.77.1"
"""The address of the first host; the second one's is the next."""
_NAMES = pathlib.Path("/etc/netns")


class Hosts:
    """The first is ``first`` to both, but this name leads to 127.0.1.1 on itself, as Debian's installer has it."""

    def __init__(self, stack: contextlib.ExitStack):
        self._spaces = [f"jrec{os.getpid()}{letter}" for letter in "ab"]
        own_name = os.uname().nodename
        for number, space in enumerate(self._spaces):
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
            (_NAMES / space).mkdir(parents=True)
            stack.callback(shutil.rmtree, _NAMES / space)
            first = "127.0.1.1" if number == 0 else FIRST
            (_NAMES / space / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own_name}\n{first} first\n")
        a, b = self._spaces
        _ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b)
        for number, space in enumerate(self._spaces):
            _ip("-n", space, "addr", "add", f"10.201.77.{number + 1}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", space, "link", "set", link, "up")
            _ip("netns", "exec", space, "true")  # which mounts, as making one does not

    def on(self, host: int) -> list[str]:
        """What to begin a command with to run it on a host."""
        return ["ip", "netns", "exec", self._spaces[host]]

    def cut(self) -> None:
        """Takes the cable out."""
        _ip("-n", self._spaces[1], "link", "set", "cable", "down")


@contextlib.contextmanager
def two_hosts():
    """Two hosts, or None where they cannot be made: that takes Linux, iproute2 and the rights of root."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = Hosts(stack)
        except (OSError, subprocess.CalledProcessError):
            hosts = None
        yield hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
