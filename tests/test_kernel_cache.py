"""Processes that start together compile a kernel once."""

import os
import pathlib
import subprocess
import sys
import time

import numba
import pytest

import jrec
from jrec.kernel_cache import compiled

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


def scaled(x, y):
    return x * 2 + y


def results(misses):
    """What two overloads give, of which so many were compiled."""
    kernel = compiled(scaled)
    found = kernel(3, 4), kernel(3.5, 4)
    assert sum(kernel.stats.cache_misses.values()) == misses
    return found


@pytest.mark.parametrize("damage", ["swap", "truncate", "flip", "empty", "index", "cut index", "older source"])
def test_a_damaged_entry_is_compiled_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert results(misses=2) == (10, 11.0)
    assert results(misses=0) == (10, 11.0)
    first, second = sorted(tmp_path.rglob("*.nbc"))
    (index,) = tmp_path.rglob("*.nbi")
    content = bytearray(first.read_bytes())
    misses = 1
    if damage == "swap":
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        misses = 2
    elif damage == "truncate":
        first.write_bytes(content[:-100])
    elif damage == "flip":
        content[len(content) // 2] ^= 64  # in the machine code
        first.write_bytes(content)
    elif damage == "empty":
        first.write_bytes(b"")
    elif damage == "index":  # the first overload's entry is said to be the second's
        index.write_bytes(index.read_bytes().replace(b".1.nbc", b".2.nbc"))
        misses = 2
    elif damage == "cut index":
        index.write_bytes(index.read_bytes()[:-40])
        misses = 2
    else:  # a process that was killed between the index of a new source and its code
        cache = compiled(scaled)._cache._cache_file
        overloads = cache._load_index()
        monkeypatch.setattr(cache, "_source_stamp", "newer")
        cache._save_index(overloads)
        monkeypatch.setattr("numba.core.caching._SourceFileBackedLocatorMixin.get_source_stamp", lambda self: "newer")
        misses = 2
    assert results(misses) == (10, 11.0)
    assert results(misses=0) == (10, 11.0)
