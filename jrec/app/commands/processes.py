"""What a command's processes are told of each other, where several run it together."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import DEVICES, integer
from jrec.errors import JrecError, LostProcessError, ProcessError, print_error
from jrec.signals import exit_code

if TYPE_CHECKING:
    from jrec.app.processes.lifeline import Lifeline
    from jrec.app.processes.meeting import Role

_TELL_SECONDS = 20.0
"""How long a process that cannot start waits for the others, to tell them."""


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments by which processes find each other."""
    many = parser.add_argument_group("several processes", "see docs/several_processes.md")
    many.add_argument("--distributed", action="store_true", help="join the processes that the cluster started")
    many.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, if there is no cluster")
    many.add_argument("--processes", type=DEVICES, metavar="N", help="how many processes there are")
    many.add_argument("--process", type=integer(0, 2**16 - 1), metavar="I", help="which process this is, from 0")


class Company:
    """The other processes of a command, if there are any.

    Args:
      role: Which process this is; None where it is the only one.
    """

    def __init__(self, role: Role | None):
        self._role = role
        self._joining = False
        self._lifeline: Lifeline | None = None
        self._code: int | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes what all of them make."""
        return self._role is None or self._role.process == 0

    def meet(self, facts: Mapping[str, str]) -> None:
        """Joins the others, so that JAX sees the devices of all, and compares what must be equal in all.

        Args:
          facts: Text by name.

        Raises:
          ConfigError: In all processes, if facts differ, one of them cannot start, or not all come.
          ProcessError: If the port is taken, or process 0 is not reached.
        """
        if self._role is None:
            return
        from jrec.app.processes.meeting import WAIT_SECONDS

        self._meet(self._role, facts, wait=WAIT_SECONDS)

    def _meet(self, role: Role, facts: Mapping[str, str], *, wait: float, refusal: str | None = None) -> None:
        self._joining = True
        from jrec.app.processes.lifeline import Lifeline
        from jrec.app.processes.meeting import compare, join
        from jrec.run.processes import key_values

        atexit.register(self._leave_at_once)  # before JAX's own, which importing it has registered
        join(role, wait=wait)
        self._lifeline = Lifeline(role, key_values())
        compare(role, facts, refusal=refusal)

    def failed(self, error: BaseException) -> ProcessError | None:
        """Tells the others that this process ends with an error.

        Returns:
          The error that says which of the others had ended before, and why; None where it is this process's own.
        """
        if self._role is None:
            return None
        why = " ".join(str(error).split())[:500] or type(error).__name__
        self._code = JrecError.exit_code if isinstance(error, JrecError | OSError) else 1
        if isinstance(error, KeyboardInterrupt):
            self._code = exit_code(error)
        if not self._joining:
            self._refuse(self._role, error, why)
        if self._lifeline is None:
            return None
        from jrec.app.processes.lifeline import SUSPECT_SECONDS, is_lost

        lost = self._lifeline.lost(SUSPECT_SECONDS) if isinstance(error, ProcessError) else None
        self._lifeline.fail(lost or why)
        if lost is None:
            return None
        kind = LostProcessError if is_lost(lost) else ProcessError
        self._code = kind.exit_code
        return kind(
            f"{lost}; look at its output for the reason. --resume goes on from the last checkpoint, with"
            " mesh.devices=N also on fewer devices"
        )

    def _refuse(self, role: Role, error: BaseException, why: str) -> None:
        """Says what is wrong, then waits for the others to tell them, too."""
        if isinstance(error, JrecError | OSError):
            print_error(error)
        with contextlib.suppress(JrecError):
            self._meet(role, {}, wait=_TELL_SECONDS, refusal=why)

    def finished(self) -> None:
        """Tells the others that this process has done its part."""
        if self._lifeline is not None:
            self._lifeline.finish()

    def _leave_at_once(self) -> None:
        """After an error: JAX would wait for the other processes, and end this one by a signal."""
        if self._code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            if self._lifeline is not None:
                self._lifeline.leave()
            os._exit(self._code)


@contextlib.contextmanager
def in_company(args: argparse.Namespace) -> Iterator[Company]:
    """The processes that run a command together; an error of one of them ends all, each with one line.

    Args:
      args: The command's arguments, ``add_process_arguments``'s among them.

    Yields:
      The other processes, which are to be met.

    Raises:
      ConfigError: If the arguments do not say which process this is.
      LostProcessError: If another process does not answer.
      ProcessError: If another process has ended with an error.
    """
    company = Company(_role(args))
    try:
        yield company
    except BaseException as error:
        if (lost := company.failed(error)) is not None:
            raise lost from error
        raise
    company.finished()


def _role(args: argparse.Namespace) -> Role | None:
    if not (args.distributed or args.coordinator):
        return None
    from jrec.app.processes.meeting import role_of

    return role_of(args.coordinator, args.processes, args.process)
