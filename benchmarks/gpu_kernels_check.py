"""``jrec kernels check`` as a step of the survey: its verdicts, one a line.

Examples:
  python -m benchmarks.gpu_kernels_check
  python -m benchmarks.gpu_kernels_check -- --timeout 20
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

COMMAND = [sys.executable, "-m", "jrec", "kernels", "check", "--json"]


def verdicts(printed: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The verdicts in what the command prints: an object a line, at once, or one object or list over several lines."""
    text, found = "", 0
    for line in printed:
        text += line
        verdict = _parsed(line)
        if isinstance(verdict, dict):
            found += 1
            yield verdict
    if not found:
        whole = _parsed(text)
        yield from whole if isinstance(whole, list) else [whole] if isinstance(whole, dict) else []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> None:
    """Runs the command and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="further arguments of `jrec kernels check`")
    arguments = parser.parse_args()
    with subprocess.Popen([*COMMAND, *arguments.arguments], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        number = 0
        for verdict in verdicts(command.stdout):
            number += 1
            print(json.dumps({"verdict": verdict}), flush=True)
    print(json.dumps({"status": command.returncode, "verdicts": number}), flush=True)
    if command.returncode == 2 and not number:  # argparse's status for a command that is not there
        print(json.dumps({"absent": "this jrec has no `jrec kernels check --json`"}), flush=True)
    elif command.returncode and not number:
        sys.exit(f"benchmarks.gpu_kernels_check: the command ended with status {command.returncode}")


if __name__ == "__main__":
    main()
