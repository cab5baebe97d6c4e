"""Starts a peer in its own environment and speaks the line protocol with it; this side runs in the benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.peers.protocol import load_arrays, save_arrays

PYTHON_VARIABLE = "JREC_PEERS_PYTHON"
FBGEMM_VARIABLE = "JREC_FBGEMM_PYTHON"  # its own environment, since an FBGEMM loads with no PyTorch but its own
TABULAR_VARIABLE = "JREC_TABULAR_PYTHON"
_ENVIRONMENTS = {"fbgemm": (FBGEMM_VARIABLE, ".venv-fbgemm"), "tabular": (TABULAR_VARIABLE, ".venv-tabular")}
"""Variables and default folders, by how a module's name begins; all others share the peers' environment."""


class PeerMissingError(Exception):
    """The peers' environment is absent or lacks a package; the message says so in one line."""


class PeerError(Exception):
    """The peer failed at a request; the message holds its traceback."""


class Peer:
    """A running peer. ``versions`` lists the distributions that it computes with."""

    def __init__(self, process: subprocess.Popen[str], module: str) -> None:
        self._process = process
        self._module = module
        self.versions: dict[str, str] = self._ask({"op": "versions"})

    def setup(self, case: str, arrays: Mapping[str, np.ndarray], **options: Any) -> None:
        """Prepares ``case`` with ``arrays`` and ``options`` (of JSON types), in place of the one before."""
        with tempfile.TemporaryDirectory() as folder:
            save_arrays(folder, arrays)
            self._ask({"op": "setup", "case": case, "folder": folder, "options": options})

    def run(self, action: str, *, calls: int = 1) -> float:
        """Seconds per call of ``action``, timed by the peer itself."""
        return self._ask({"op": "run", "action": action, "calls": calls})

    def call(self, action: str) -> dict[str, np.ndarray]:
        """Calls ``action`` once and fetches the arrays it returns."""
        with tempfile.TemporaryDirectory() as folder:
            self._ask({"op": "call", "action": action, "folder": folder})
            return load_arrays(folder)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"peer {self._module} ended with exit status {self._process.wait()} at {request['op']!r}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(f"peer {self._module} failed at {request}: {reply['error']}")
        return reply["value"]


def python(module: str) -> pathlib.Path:
    """The interpreter of a peer's environment.

    FBGEMM's modules run in $JREC_FBGEMM_PYTHON, else .venv-fbgemm in the checkout; `tabular` in $JREC_TABULAR_PYTHON,
    else .venv-tabular; the others in $JREC_PEERS_PYTHON, else .venv-peers.

    Args:
      module: Its name in ``benchmarks.peers``.

    Raises:
      PeerMissingError: if there is none.
    """
    variable, folder = _ENVIRONMENTS.get(module.partition("_")[0], (PYTHON_VARIABLE, ".venv-peers"))
    named = os.environ.get(variable)
    path = pathlib.Path(named) if named else harness.ROOT / folder / "bin" / "python"
    if not path.is_file():
        origin = f"${variable}" if named else "the default place"
        raise PeerMissingError(f"no peers' environment: {path} ({origin}) is no file; see benchmarks/peers/README.md")
    return path


@contextlib.contextmanager
def start(module: str) -> Iterator[Peer]:
    """Starts ``benchmarks.peers.MODULE`` with as many threads as jrec has cores, and ends it afterwards.

    Raises:
      PeerMissingError: if the environment is absent or the peer's imports fail in it.
    """
    interpreter = python(module)
    threads = str(harness.cores())
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))},
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **harness.peer_environment(),
    }
    process = subprocess.Popen(
        [str(interpreter), "-m", f"benchmarks.peers.{module}"],
        cwd=harness.ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        try:
            peer = Peer(process, module)
        except PeerError as error:
            raise PeerMissingError(
                f"{interpreter} cannot run benchmarks.peers.{module} ({error}); see benchmarks/peers/README.md"
            ) from error
        yield peer
    finally:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def start_or_skip(module: str) -> Iterator[Peer | None]:
    """Like ``start``, but a missing environment gives None and one clear line on stderr."""
    with contextlib.ExitStack() as stack:
        try:
            peer = stack.enter_context(start(module))
        except PeerMissingError as error:
            print(f"peer {module} skipped: {error}", file=sys.stderr, flush=True)
            peer = None
        yield peer
