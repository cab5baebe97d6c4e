"""Processes that start together compile a kernel once."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import numba
import pytest

import jrec
from jrec import kernel_cache
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


KERNELS = {
    "a.py": "from jrec.b import helper, NUMBER\nfrom jrec.kernel_cache import compiled\n\n@compiled\ndef kernel(x):\n"
    "    return helper(x) + NUMBER\n",
    "b.py": "from jrec.kernel_cache import compiled\nNUMBER = 1\n\n@compiled\ndef helper(x):\n    return x * 2\n",
    "other.py": "NUMBER = 0\n",
}
CALL = "import jrec.a as a; print(a.kernel(20), sum(a.kernel.stats.cache_misses.values()))"


def clone(folder):
    """A package ``jrec`` with two kernels, and what they need of the real one."""
    package = folder / "jrec"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for file in pathlib.Path(jrec.__file__).parent.glob("*.py"):
        if file.name != "__init__.py":
            shutil.copy(file, package)
    for name, text in KERNELS.items():
        (package / name).write_text(text)
    return package


def called(package, cache):
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "JREC_KERNEL_CACHE")}
    environment |= {"PYTHONPATH": str(package.parent), "JREC_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=environment, cwd=package.parent, capture_output=True, text=True, check=True
    )
    return tuple(map(int, done.stdout.split()))


def test_clones_share_kernels_and_none_runs_an_older_helper(tmp_path):
    one, other, cache = clone(tmp_path / "one"), clone(tmp_path / "other"), tmp_path / "cache"
    assert called(one, cache) == (41, 1)
    (other / "other.py").write_text("NUMBER = 5\n")  # nothing of it is compiled in
    assert called(other, cache) == (41, 0)
    assert not list(one.rglob("*.nbi"))
    (one / "b.py").write_text(KERNELS["b.py"].replace("NUMBER = 1", "NUMBER = 7"))
    assert called(one, cache) == (47, 1)
    assert called(other, cache) == (41, 0)


def test_without_a_cache_folder_kernels_lie_beside_their_source(tmp_path):
    package = clone(tmp_path / "one")
    (tmp_path / "file").touch()
    assert called(package, tmp_path / "file") == (41, 1)
    assert list(package.rglob("*.nbi"))
    assert called(package, tmp_path / "file") == (41, 0)
    (package / "b.py").write_text(KERNELS["b.py"].replace("* 2", "* 3"))
    assert called(package, tmp_path / "file") == (61, 1)  # by content there, too


def test_kernels_that_nobody_asks_for_are_forgotten(tmp_path):
    package, cache = clone(tmp_path / "one"), tmp_path / "cache"
    called(package, cache)
    folders = list((cache / "kernels").iterdir())
    for folder in folders:
        os.utime(folder, (0, 0))
    assert called(package, cache) == (41, 0)  # asked for again
    for folder in folders:
        os.utime(folder, (0, 0))
    (package / "a.py").write_text(KERNELS["a.py"] + "\n")
    (package / "b.py").write_text(KERNELS["b.py"] + "\n")
    called(package, cache)
    assert not [folder for folder in folders if folder.exists()]


def test_imports_over_several_lines_are_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "_PACKAGE", tmp_path)
    (tmp_path / "native").mkdir()
    for name in ("native/__init__.py", "native/one.py", "native/two.py", "leaf.py"):
        (tmp_path / name).touch()
    (tmp_path / "x.py").write_text(
        "import os\nfrom jrec.native import (\n    one,\n    two,\n)\nfrom jrec.leaf import A, B  # both\n"
        "def f():\n    from jrec.native.three import C\n"
    )
    names = {path.relative_to(tmp_path).as_posix() for path in kernel_cache._imported(tmp_path / "x.py")}
    assert names == {"native/one.py", "native/two.py", "leaf.py"}
