"""Processes that start together compile a kernel once."""

import os
import pathlib
import subprocess
import sys
import time

import jrec

MODULE = """
import pathlib, sys, time
from jrec.kernel_cache import compiled

@compiled
def inner(x):
    return x * 2

@compiled
def outer(x):
    total = 0
    for i in range(x):
        total += inner(i)
    return total

if __name__ == "__main__":
    here = pathlib.Path(sys.argv[1])
    (here / f"ready-{sys.argv[2]}").touch()
    while not (here / "go").exists():
        time.sleep(0.005)
    assert outer(4) == 12
    print(sum(outer.stats.cache_misses.values()), sum(inner.stats.cache_misses.values()))
"""


def test_processes_that_start_together_compile_once(tmp_path):
    (tmp_path / "kernels.py").write_text(MODULE)
    root = str(pathlib.Path(jrec.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "kernels.py"), str(tmp_path), str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < len(processes):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    printed = sorted(process.communicate()[0].strip() for process in processes)
    assert printed == ["0 0", "0 0", "1 1"]
