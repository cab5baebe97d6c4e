"""``jrec kernels check`` as a step of the survey: its verdicts, one a line.

Examples:
  python -m benchmarks.gpu_kernels_check
  python -m benchmarks.gpu_kernels_check -- --interpret --only 'gather_reduce float32 64'
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

CHECK = (sys.executable, "-m", "jrec", "kernels", "check", "--json")
ONLY = (
    "--only", "tensor_cast int32 1", "--only", "gather_reduce float32 64",
    "--only", "casted_update float32 64 RowWiseAdagrad", "--only", "casted_update bfloat16 128 SGD",
)  # fmt: skip


def main() -> None:
    """Runs the command and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=75, help="for the check (default: 75)")
    parser.add_argument(
        "arguments", nargs="*", help="arguments of `jrec kernels check`, after --; without any, a few usual classes"
    )
    arguments = parser.parse_args()
    command = [*CHECK, "--timeout", str(arguments.seconds), *(arguments.arguments or ONLY)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    for line in lines:
        print(json.dumps({"verdict": json.loads(line)}))
    print(json.dumps({"status": done.returncode, "verdicts": len(lines)}), flush=True)
    if not lines:
        sys.exit(f"benchmarks.gpu_kernels_check: the command ended with status {done.returncode} and no verdict")


if __name__ == "__main__":
    main()
