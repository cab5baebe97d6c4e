"""Reads tensor files in a process of its own, which a file may end. Writes a line of JSON before and after each."""

import json
import pathlib
import resource
import signal
import subprocess
import sys
import warnings

ROOM = 128 << 20  # bytes of address space for reading a file, and its map
SECONDS = 30


def outcomes(paths):
    """What comes of each file, by its name: (dtype, shape, hexadecimal digits) of its tensors by name, or the error."""
    found, left = {}, [str(path) for path in paths]
    while left:
        child = subprocess.run([sys.executable, __file__], input="\n".join(left), capture_output=True, text=True)
        lines = [json.loads(line) for line in child.stdout.splitlines()]
        assert lines, child.stderr
        for path, outcome in lines:
            found[path] = outcome or f"the process ended by {child.returncode}: {child.stderr[-500:]}"
        left = left[len({path for path, _ in lines}) :]
    return {pathlib.Path(path).name: outcome for path, outcome in found.items()}


def write(line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main():
    from jrec.app.imports import read_state_dict
    from jrec.errors import CheckpointError

    warnings.simplefilter("error")
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for path in sys.stdin.read().splitlines():
        write([path, None])
        signal.alarm(SECONDS)  # ends the process
        try:
            tensors = read_state_dict(path)
            outcome = {key: [str(a.dtype), list(a.shape), a.tobytes().hex()] for key, a in tensors.items()}
        except CheckpointError as error:
            outcome = f"refused: {error}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:500]
        write([path, outcome])


if __name__ == "__main__":
    main()
