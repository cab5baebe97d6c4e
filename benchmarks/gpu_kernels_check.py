"""``jrec kernels check`` as a step of the survey: its verdicts, one a line.

Examples:
  python -m benchmarks.gpu_kernels_check
  python -m benchmarks.gpu_kernels_check -- --interpret --only 'gather_reduce 64'
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

JREC = (sys.executable, "-m", "jrec", "kernels")
CHECK = (*JREC, "check", "--json", "--quiet")
SHOW = (*JREC, "show", "--json")


def verdicts(printed: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The verdicts in what the command prints: an object a line, at once, or one object or list over several lines."""
    text, count = "", 0
    for line in printed:
        text += line
        verdict = _parsed(line)
        if isinstance(verdict, dict):
            count += 1
            yield verdict
    if not count:
        whole = _parsed(text)
        yield from whole if isinstance(whole, list) else [whole] if isinstance(whole, dict) else []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def emit(line: dict[str, Any]) -> None:
    """Prints a line at once."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Runs the command and prints its lines; those that are kept, where its time is up before it has printed any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75, help="for the command (default: 75)")
    parser.add_argument("arguments", nargs="*", help="further arguments of `jrec kernels check`, after --")
    arguments = parser.parse_args()
    if importlib.util.find_spec("jrec.commands.kernels") is None:
        emit({"absent": "this jrec has no `jrec kernels check`"})
        return
    number = 0
    with subprocess.Popen([*CHECK, *arguments.arguments], stdout=subprocess.PIPE, text=True) as command:
        timer = threading.Timer(arguments.seconds, command.kill)
        timer.start()
        assert command.stdout is not None
        for verdict in verdicts(command.stdout):
            emit({"verdict": verdict})
            number += 1
        status = command.wait()
        timer.cancel()
    if status < 0:  # killed: what it found until then is kept by jrec
        kept = subprocess.run(SHOW, stdout=subprocess.PIPE, text=True, check=False, timeout=30).stdout
        for verdict in verdicts(kept.splitlines(keepends=True)):
            emit({"verdict": verdict})
            number += 1
    emit({"status": status, "verdicts": number})
    if status < 0 or not number:
        sys.exit(f"benchmarks.gpu_kernels_check: the command ended with status {status} and {number} verdicts")


if __name__ == "__main__":
    main()
