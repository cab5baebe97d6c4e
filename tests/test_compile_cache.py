"""What was compiled is kept for the next process, but never half an entry, and never for another kind of machine."""

import os
import pathlib
import subprocess
import sys
import zlib

import pytest
from child_processes import compiling
from run_cases import CONFIG, quickstart

from jrec import compile_cache
from jrec.compile_cache import enabled, machine_kind, run_folder
from jrec.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT = 1 << 20
WHOLE = zlib.compress(b"a program" * 100)


def _entries(folder):
    """The names of what a run's folder or a lasting one holds."""
    return sorted(entry.name.partition("-cache")[0] + "-cache" for entry in folder.glob("*-cache*"))


def _kept(folder, name):
    (path,) = folder.glob(f"{name}-cache.*")
    return path


def test_whole_entries_outlive_a_process_and_halves_do_not(tmp_path):
    with run_folder(tmp_path / "lasting", limit=LIMIT) as run:
        (run / "one-cache").write_bytes(WHOLE)
        (run / "torn-cache").write_bytes(WHOLE[:-3])
        assert not _entries(tmp_path / "lasting")
    assert not run.exists()
    assert _entries(tmp_path / "lasting") == ["one-cache"]
    with run_folder(tmp_path / "lasting", limit=LIMIT) as run:
        assert (run / "one-cache").read_bytes() == WHOLE
    assert _kept(tmp_path / "lasting", "one").read_bytes() == WHOLE


def test_a_damaged_or_swapped_entry_is_compiled_anew(tmp_path):
    programs = {f"{name}-cache": zlib.compress(name.encode() * 100) for name in ("a", "b", "c", "d")}
    with run_folder(tmp_path, limit=LIMIT) as run:
        for name, program in programs.items():
            (run / name).write_bytes(program)
    one, other, damaged = (_kept(tmp_path, name) for name in ("a", "b", "c"))
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (tmp_path / "old-cache").write_bytes(WHOLE)  # as an earlier jrec kept them
    with run_folder(tmp_path, limit=LIMIT) as run:
        assert _entries(run) == ["d-cache"]
        assert _entries(tmp_path) == ["d-cache", "old-cache"]
        for name in ("a-cache", "b-cache", "c-cache"):
            (run / name).write_bytes(programs[name])
    with run_folder(tmp_path, limit=LIMIT) as run:
        assert {name: (run / name).read_bytes() for name in programs} == programs


def test_a_killed_process_leaves_its_whole_entries_to_the_next(tmp_path):
    code = f"""
import os, pathlib, signal
from jrec.compile_cache import run_folder
with run_folder(pathlib.Path({str(tmp_path)!r}), limit=1000) as run:
    (run / "one-cache").write_bytes({WHOLE!r})
    (run / "torn-cache").write_bytes({WHOLE[:-3]!r})
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.glob("run-*")
    with run_folder(tmp_path, limit=LIMIT) as run, run_folder(tmp_path, limit=LIMIT) as other:
        assert not left.exists()
        assert run.exists()  # the second one does not take a living one's
        assert _entries(run) == _entries(other) == ["one-cache"]


def test_what_was_not_used_for_the_longest_time_makes_room(tmp_path):
    with run_folder(tmp_path, limit=LIMIT) as run:
        for number in range(4):
            (run / f"{number}-cache").write_bytes(zlib.compress(bytes(1)) + bytes(89))
    for number, read in enumerate((10, 40, 20, 30)):
        os.utime(_kept(tmp_path, number), (read, 5))
    with run_folder(tmp_path, limit=2 * 98):
        pass
    assert _entries(tmp_path) == ["1-cache", "3-cache"]


def test_each_kind_of_machine_has_a_folder_of_its_own(tmp_path):
    info = tmp_path / "cpuinfo"
    kinds = set()
    for model, flags in (("A", "avx2 fma"), ("A", "avx2 avx512f fma"), ("B", "avx2 fma")):
        info.write_text(f"processor : 0\nmodel name\t: {model}\ncpu MHz : {len(kinds)}\nflags\t\t: {flags}\n")
        kinds.add(machine_kind(info))
    info.write_text("processor : 0\nmodel name\t: B\ncpu MHz : 9\nflags\t\t: fma avx2\n")
    assert machine_kind(info) in kinds
    assert len(kinds) == 3


@pytest.fixture
def no_jax(monkeypatch, tmp_path):
    """As a process has it that did not import JAX yet."""
    monkeypatch.setenv("JREC_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delitem(sys.modules, "jax")
    return monkeypatch


def test_jax_is_told_of_the_folder(no_jax, tmp_path):
    with enabled():
        folder = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
        assert folder.parent == tmp_path / "jax" / machine_kind()
        (folder / "one-cache").write_bytes(WHOLE)
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert _entries(folder.parent) == ["one-cache"]


def test_what_the_user_chose_stays(no_jax, tmp_path):
    no_jax.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    with enabled():
        assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"
    no_jax.delenv("JAX_COMPILATION_CACHE_DIR")
    no_jax.setenv("JREC_COMPILE_CACHE_MIB", "0")
    with enabled():
        assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_stops_nothing(no_jax, tmp_path):
    (tmp_path / "file").touch()
    no_jax.setenv("JREC_CACHE", str(tmp_path / "file" / "cache"))
    with enabled():
        assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("size", ["many", "-1", "1.5"])
def test_a_size_that_is_none_is_refused(no_jax, size):
    no_jax.setenv("JREC_COMPILE_CACHE_MIB", size)
    with pytest.raises(ConfigError, match=f"JREC_COMPILE_CACHE_MIB is '{size}'"), enabled():
        pass


@pytest.mark.slow
def test_programs_from_the_cache_compute_the_same_bits(tmp_path):
    (tmp_path / "tiny.toml").write_text(CONFIG)
    data = quickstart(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["JREC_CACHE"] = str(tmp_path / "cache")

    def train(out, mib):
        arguments = ["train", "tiny.toml", f"data.path={data}", f"out={out}", "max_steps=7"]
        subprocess.run(
            [sys.executable, "-m", "jrec", *arguments],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(pathlib.Path(compile_cache.__file__).parents[1]), **mib},
            check=True,
            capture_output=True,
        )
        saved = tmp_path / out / "checkpoints" / "7"
        bits = {str(file.relative_to(saved)): file.read_bytes() for file in saved.rglob("*") if file.is_file()}
        return bits, {e.name: e.stat().st_mtime_ns for e in (tmp_path / "cache").rglob("*-cache.*")}

    uncached = train("uncached", {"JREC_COMPILE_CACHE_MIB": "0"})
    cold, warm = train("cold", {}), train("warm", {})
    assert not uncached[1]
    assert warm[1] == cold[1]  # nothing was compiled
    assert any("train" in name for name in cold[1])
    assert uncached[0] == cold[0] == warm[0]


def test_a_process_that_goes_on_after_a_command_compiles_without_the_folder(tmp_path):
    """Otherwise every program warned that its entry cannot be written."""
    data = quickstart(tmp_path, rows=200)
    code = f"""
import warnings
from jrec.cli import main
warnings.simplefilter("error")
for number in range(2):
    keys = ["data.path={data}", "data.batch_size=16", "max_steps=2", "evaluate.baselines=off", f"seed={{number}}"]
    assert main(["train", "quickstart", *keys, f"out={tmp_path}/run{{number}}"]) == 0
import jax
jax.jit(lambda x: x * 17 + 4)(3.0)
"""
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "JREC_CACHE": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
        **compiling("JREC_KERNEL_CACHE", "XLA_FLAGS"),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "persistent compilation cache" not in done.stderr
    assert list((tmp_path / "cache").rglob("*-cache.*"))
