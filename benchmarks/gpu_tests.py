"""The tests marked ``gpu``, as a step of the survey: a line for every test, whatever happens to the others.

Needs pytest and hypothesis. With pytest-xdist, tests run on several workers; with pytest-timeout, a test that hangs is
ended alone. The tests that take more than 8 GB of the GPU's memory come last, in one process.

Examples:
  python -m benchmarks.gpu_tests --workers 8
  python -m benchmarks.gpu_tests --files tests/test_gpu_tt.py
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, TextIO

from benchmarks import resume
from benchmarks.harness import ROOT

BIG = "past_32_bit"  # what the names of tests with tables above 8 GB have in common
TEST_SECONDS = 90
MARK = "mark.gpu"


class Lines:
    """A pytest plugin: prints a line when a test begins and when it ends, and leaves out those that ended before.

    In a run on several workers only the process that gathers their reports prints.
    """

    def __init__(self, stdout: TextIO, earlier: list[dict[str, Any]]) -> None:
        self._stdout = stdout
        self._ended = {line["end"] for line in earlier if isinstance(line.get("end"), str)}
        self._begun = collections.Counter(line["begin"] for line in earlier if isinstance(line.get("begin"), str))
        self._seconds: collections.Counter[str] = collections.Counter()
        self._outcomes: dict[str, str] = {}
        self._errors: dict[str, str] = {}

    def emit(self, line: dict[str, Any]) -> None:
        """Prints one line at once."""
        print(json.dumps(line), file=self._stdout, flush=True)

    def left_out(self) -> list[str]:
        """Tests that ended in an earlier run, or took the run with them too often."""
        hopeless = [test for test, count in self._begun.items() if count >= resume.ATTEMPTS and test not in self._ended]
        for test in hopeless:
            self.emit({"end": test, "outcome": "failed", "error": f"did not end in {resume.ATTEMPTS} attempts"})
        return [*self._ended, *hopeless]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.emit({"begin": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A phase of a test ended; its outcome is the worst phase's."""
        test = report.nodeid
        self._seconds[test] += report.duration
        if report.failed or (report.skipped and test not in self._outcomes):
            self._outcomes[test] = report.outcome
            self._errors[test] = _last_line(report)
        if report.when not in ("setup", "call", "teardown"):  # pytest-xdist's word for a worker that crashed
            self.pytest_runtest_logfinish(test)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test ended."""
        line: dict[str, Any] = {"end": nodeid, "outcome": self._outcomes.get(nodeid, "passed")}
        if nodeid in self._errors:
            line["reason" if line["outcome"] == "skipped" else "error"] = self._errors[nodeid]
        self.emit({**line, "seconds": round(self._seconds[nodeid], 2)})


def _last_line(report: Any) -> str:
    """Why a test failed or was skipped, in at most 500 characters."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[-1])[:500]
    text = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(report.longrepr)
    return " ".join(text.split())[-500:]


def gpu_files() -> list[str]:
    """Test files with tests of a GPU; others would be imported, and need packages that are not there, for nothing."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if MARK in f.read_text(encoding="utf-8")]


def run(plugin: Lines, files: list[str], *, workers: int, mark: str, big: bool) -> int:
    """One run of pytest, in this process; its exit status."""
    import pytest

    arguments = ["-q", "-p", "no:cacheprovider", "-m", mark, "-k", BIG if big else f"not {BIG}", "--tb=short"]
    for test in plugin.left_out():
        arguments += ["--deselect", test]
    if has("xdist"):
        arguments += ["-n", "0" if big else str(workers), "--dist", "worksteal"]
    if has("pytest_timeout"):
        # A thread's timeout ends the process, also while it waits for the GPU, where no signal handler would run.
        arguments += ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    return int(pytest.main([*arguments, *files], plugins=[plugin]))


def has(module: str) -> bool:
    """Whether a module can be imported; nothing is."""
    return importlib.util.find_spec(module) is not None


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workers", type=int, default=8, help="processes, where pytest-xdist is there (default: 8)")
    made.add_argument("--files", nargs="+", metavar="FILE", help="test files (default: those with tests marked gpu)")
    made.add_argument("--mark", default="gpu", help="which tests (default: gpu)")
    made.add_argument("--earlier", type=pathlib.Path, metavar="FILE",
                      help="lines of a run that was cut off: its finished tests are skipped")  # fmt: skip
    made.add_argument("--part", choices=("small", "big"), help="only the tests on several workers, or the big ones")
    return made


def main() -> None:
    """Runs the small tests on several workers, then the big ones one at a time, each in a process of its own."""
    arguments = _parser().parse_args()
    # pytest's own output goes to stderr: stdout holds lines alone.
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    plugin = Lines(stdout, list(resume.read_lines(arguments.earlier)))
    if needed := [name for name in ("pytest", "hypothesis") if not has(name)]:
        plugin.emit({"absent": f"{', '.join(needed)} cannot be imported here: the tests cannot run"})
        return
    if arguments.part is not None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share the GPU's memory
        os.chdir(ROOT)
        files = arguments.files or gpu_files()
        big = arguments.part == "big"
        sys.exit(run(plugin, files, workers=arguments.workers, mark=arguments.mark, big=big))
    plugin.emit({"workers": arguments.workers if has("xdist") else 1, "timeout": has("pytest_timeout")})
    statuses = []
    for tests in ("small", "big"):
        command = [sys.executable, "-m", "benchmarks.gpu_tests", *sys.argv[1:], "--part", tests]
        status = subprocess.run(command, stdout=stdout.fileno(), check=False).returncode
        plugin.emit({"pytest": tests, "status": status})
        statuses.append(status)
    if bad := [status for status in statuses if status not in (0, 1, 5)]:  # 1: tests failed, 5: there were none
        sys.exit(f"benchmarks.gpu_tests: pytest ended with status {bad[0]}")


if __name__ == "__main__":
    main()
