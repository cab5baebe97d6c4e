"""Tries a command with a fault at each of its calls: the old state, the new one, or a clear error; never a hang."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from .cases import Case, write_dlrm, write_inputs
from .durable import unsynced_names
from .server import Reply, Request

OPEN, READ, WRITE, SYNC, RENAME, OTHER, CREATE, REMOVE = (2**n for n in range(8))
TAKES_ROOM = CREATE | WRITE | SYNC | RENAME | OTHER
CHANGES = TAKES_ROOM | REMOVE
FAIL, FAIL_ON, SHORT, SIGNAL, SIGNAL_TWICE, LIST = range(1, 7)
HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Mode:
    """What is done at the n-th call of some kinds."""

    kinds: int
    action: int
    number: int


MODES = {
    "full disk": Mode(TAKES_ROOM, FAIL_ON, errno.ENOSPC),  # from the n-th call on; files can still be removed
    "failing write": Mode(CHANGES, FAIL, errno.EIO),
    "failing read": Mode(OPEN | READ, FAIL, errno.EIO),
    "half": Mode(READ | WRITE, SHORT, 0),  # of what was asked for, as the system may do
    "SIGINT": Mode(OPEN | READ | CHANGES, SIGNAL, signal.SIGINT),
    "SIGTERM": Mode(OPEN | READ | CHANGES, SIGNAL, signal.SIGTERM),
    "SIGKILL": Mode(CHANGES, SIGNAL, signal.SIGKILL),
    "two SIGINT": Mode(OPEN | READ | CHANGES, SIGNAL_TWICE, signal.SIGINT),
}
_ENDED_BY = {"SIGINT": {130, -2}, "SIGTERM": {130, 143, -15}, "SIGKILL": {-9}, "two SIGINT": {130, -2}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A point that was tried.

    Attributes:
      mode, at: What, at which call of its kinds.
      met: That call and its path.
      outcome: "old", "new" or "begun" (with a clear error), "as if nothing" (success all the same); or what is wrong:
        "hang", "third state", "traceback", "lost", "unnamed" (an error that names no file, or not the full disk).
      said: What the process said, where something is wrong.
    """

    mode: str
    at: int
    met: str
    outcome: str
    said: str = ""

    @property
    def good(self) -> bool:
        """Whether it ended as it has to."""
        return self.outcome in ("old", "new", "begun", "as if nothing")


def compiled_layer(folder: pathlib.Path) -> pathlib.Path:
    """The layer as a shared library.

    Raises:
      RuntimeError: If there is no C compiler.
    """
    if (compiler := shutil.which("cc")) is None or not sys.platform.startswith("linux"):
        raise RuntimeError("faults are injected on Linux by a library that a C compiler makes; there is no cc here")
    library = folder / "layer.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "layer.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class Trials:
    """A case's processes and folders."""

    def __init__(self, case: Case, folder: pathlib.Path):
        self.case, self.work, self._template = case, folder / "work", folder / "template"
        libraries = [str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FAULTS_")},
            "LD_PRELOAD": str(compiled_layer(folder)),
            "PYTHONPATH": os.pathsep.join(filter(None, libraries)),
            # With the flags of tests, where these run it: programs compile in half the time. The last number counts.
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={case.devices}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONFAULTHANDLER": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), *case.modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.old: dict[str, str] = {}
        self.new: dict[str, str] = {}
        self._points: dict[int, int] = {}

    def prepare(self) -> None:
        """Runs what comes before the command, and the command, twice: both times it has to make the same.

        Raises:
          AssertionError: If a command fails, or this one changes nothing, not always the same, or gives a name to what
            is not on the disk.
        """
        case = self.case
        self.work.mkdir()
        write_inputs(self.work)
        for command in case.setup:
            self._done(command)
            if "import-dlrm" in case.command and not (self.work / "dlrm.pt").exists():
                write_dlrm(self.work)
        self.old = case.state(self.work)
        self.work.rename(self._template)
        self._fresh()
        self._done(case.command)
        self.new = case.state(self.work)
        if not self.new or self.new == self.old:
            raise AssertionError(f"{case.command} changes nothing, so that its trials show nothing")
        self._fresh()
        calls = self._done(case.command, kinds=CHANGES, action=LIST).met
        if unsynced := unsynced_names(self.work, calls):
            raise AssertionError(f"{case.command} could lose its work with the power: {'; '.join(unsynced)}")
        if (again := case.state(self.work)) != self.new:
            names = sorted(name for name in {*again, *self.new} if again.get(name) != self.new.get(name))
            raise AssertionError(f"{case.command} gives other bits each time: {', '.join(names)}")

    def points(self, mode: str) -> int:
        """How many calls there are to meet."""
        kinds = MODES[mode].kinds
        if kinds not in self._points:
            self._fresh()
            self._points[kinds] = self._run(self.case.command, kinds=kinds).seen
        return self._points[kinds]

    def attempt(self, mode: str, at: int, *, command: str | None = None, seconds: float = 120) -> Tried:
        """Meets one call.

        Args:
          mode: What happens to it.
          at: Which of the calls of the mode's kinds, from 1.
          command: What is run instead of the case's command.
          seconds: How long it may take.
        """
        self._fresh()
        how = MODES[mode]
        fault = {"kinds": how.kinds, "action": how.action, "number": how.number, "at": at}
        reply = self._run(command or self.case.command, **fault, seconds=seconds)
        outcome = self._outcome(mode, reply)
        tried = Tried(mode=mode, at=at, met=reply.met.strip().replace(f"{self.work}/", ""), outcome=outcome)
        said = reply.said
        if tried.good and outcome not in ("new", "as if nothing"):
            again = self._run(self.case.recover or self.case.command)
            if again.code or self.case.state(self.work) != self.new:
                tried, said = dataclasses.replace(tried, outcome="lost"), f"{reply.said}\n--- then:\n{again.said}"
        return tried if tried.good else dataclasses.replace(tried, said=f"exit {reply.code}: {said}")

    def close(self) -> None:
        """Ends the process."""
        self._server.communicate()

    def _outcome(self, mode: str, reply: Reply) -> str:
        state = self.case.state(self.work)
        if reply.hung:
            return "hang"
        if reply.code == 0:
            return "as if nothing" if state == self.new else "third state"
        if reply.code not in _ENDED_BY.get(mode, {2}) and reply.code != 2:
            return "traceback"
        if "Traceback (most recent" in reply.said or "Fatal Python error" in reply.said:
            return "traceback"
        if reply.code == 2 and not any(line.startswith("jrec: error: ") for line in reply.said.splitlines()):
            return "unnamed"
        if reply.code == 2 and mode not in _ENDED_BY and not self._names_a_file(reply):
            return "unnamed"
        if reply.code == 2 and mode == "full disk" and os.strerror(errno.ENOSPC) not in _error(reply):
            return "unnamed"
        if state in (self.old, self.new):
            return "new" if state == self.new else "old"
        return "begun" if self.case.partly else "third state"

    def _names_a_file(self, reply: Reply) -> bool:
        """Whether the error names an output, or the file of the first call that was met."""
        met = pathlib.Path(reply.met.partition("\n")[0].split(" ", 2)[2]).name
        return any(name and name in _error(reply) for name in (*self.case.outputs, met, met.removesuffix(".partial")))

    def _fresh(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self._template, self.work)

    def _done(self, command: str, **listing: float) -> Reply:
        reply = self._run(command, **listing)
        if reply.code:
            raise AssertionError(f"{command}: exit {reply.code}\n{reply.said}")
        return reply

    def _run(self, command: str, **fault: float) -> Reply:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        within = str(self.work / self.case.within)
        request = Request(folder=str(self.work), within=within, command=command.split(), **fault)
        print(json.dumps(dataclasses.asdict(request)), file=self._server.stdin, flush=True)
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {self._server.wait()}")
        return Reply(**json.loads(line))


def _error(reply: Reply) -> str:
    return next(line for line in reply.said.splitlines() if line.startswith("jrec: error: "))


@contextlib.contextmanager
def trials(case: Case) -> Iterator[Trials]:
    """A case, ready to be tried in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="jrec-faults-") as folder:
        made = Trials(case, pathlib.Path(folder).resolve())
        try:
            made.prepare()
            yield made
        finally:
            made.close()
