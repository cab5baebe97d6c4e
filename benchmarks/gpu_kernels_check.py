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
from collections.abc import Iterator
from typing import Any

COMMAND = [sys.executable, "-m", "jrec", "kernels", "check", "--json"]


def lines_of(text: str) -> Iterator[dict[str, Any]]:
    """The verdicts in what the command printed: JSON lines, or one object or list over several."""
    try:
        whole = json.loads(text)
    except ValueError:
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield {"verdict": found}
        return
    for found in whole if isinstance(whole, list) else [whole]:
        yield {"verdict": found}


def main() -> None:
    """Runs the command and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="further arguments of `jrec kernels check`")
    arguments = parser.parse_args()
    with subprocess.Popen([*COMMAND, *arguments.arguments], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        text = command.stdout.read()
    number = 0
    for line in lines_of(text):
        number += 1
        print(json.dumps(line), flush=True)
    print(json.dumps({"status": command.returncode, "verdicts": number}), flush=True)
    if command.returncode == 2 and not number:  # argparse's status for a command that is not there
        print(json.dumps({"absent": "this jrec has no `jrec kernels check --json`"}), flush=True)
    elif command.returncode and not number:
        sys.exit(f"benchmarks.gpu_kernels_check: the command ended with status {command.returncode}")


if __name__ == "__main__":
    main()
