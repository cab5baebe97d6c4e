"""The first call on a GPU, rehearsed on a CPU by the rules of a machine that is rented for minutes.

Such a machine has the packages of gpu_machine.txt and what `scripts/gpu_first.sh` brings, and no history of the
repository; it may be taken back at any second; and of the folder $OUT it gives back a few small files. The benchmarks
run at tiny sizes, kernels in their interpreter.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from random import Random

import pytest
from test_gpu_first import kill_session

from benchmarks import gpu_first, harness, resume

STEPS = ("check", "steps", "train", "counters", "tests")
FILES, BYTES, DEPTH = 8, 16 << 20, 3
MINUTES = 5  # of a call that nobody kills
LINES = gpu_first.LINES
BARE = """
import importlib.metadata, sys
BLOCKED, HIDDEN = {blocked}, {hidden}

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is not on the machine", name=name)

whole = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.lower().replace("_", "-") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return whole(cls, name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
sys.meta_path.insert(0, Bare())
"""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def there() -> set[str]:
    """The packages that Python finds on the machine."""
    script = (harness.ROOT / "scripts" / "gpu_first.sh").read_text()
    brought = re.search(r"^packages=\((.*)\)$", script, re.MULTILINE)
    return {*map(_normal, (harness.ROOT / "tests" / "gpu_machine.txt").read_text().split()), *brought[1].split()}


def bare(folder: pathlib.Path) -> None:
    """Writes the module that lets Python find only these packages, from its start."""
    on_machine = there()
    modules = importlib.metadata.packages_distributions()
    blocked = {m for m, of in modules.items() if m != "jrec" and not on_machine & set(map(_normal, of))}
    hidden = {_normal(of) for m in blocked | {"jrec"} for of in modules.get(m, [])}
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BARE.format(blocked=blocked, hidden=hidden))


def checkout(folder: pathlib.Path) -> None:
    """A copy of the working tree, without its history, as links; with what `gpu_first.sh prepare` adds."""
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(harness.ROOT / "scripts" / "gpu_first.sh", folder / "scripts")
    for name in ("benchmarks", "configs", "jrec", "tests", "pyproject.toml"):
        (folder / name).symlink_to(harness.ROOT / name)
    (folder / ".gpu").mkdir()
    (folder / ".gpu" / "commit").write_text("0123456789ab\n")


class Machine:
    def __init__(self, folder: pathlib.Path):
        bare(folder / "bare")
        self.checkout = folder / "checkout"
        checkout(self.checkout)
        path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder / "bare")}

    def call(self, out: pathlib.Path, seconds: float) -> tuple[int | None, str, float]:
        """The exit status, None where the call was killed after some seconds; what it printed, and how long it took."""
        command = ["bash", "scripts/gpu_first.sh", "--dry-run", "--minutes", str(MINUTES), "--only", *STEPS]
        begin = time.monotonic()
        call = subprocess.Popen(command, cwd=self.checkout, env={**self.environment, "OUT": str(out)}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        printed, status = "", None
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = call.communicate(timeout=seconds)
            status = call.returncode
        kill_session(call.pid)
        call.communicate()
        return status, printed, time.monotonic() - begin


def test_a_bare_machine_has_what_the_calls_need():
    on_machine = there()
    assert {"jax", "numba", "flax", "grain", "msgspec", "tensorboardx"} <= on_machine
    assert "igraph" not in on_machine


@pytest.mark.slow
def test_calls_that_are_killed_bring_everything_home(tmp_path):
    machine, random, before, took = Machine(tmp_path), Random(), [], []
    # Anywhere in the first two steps, then anywhere in the others; where it was, the assertions' messages say.
    for number, seconds in enumerate((random.uniform(3, 30), random.uniform(3, 30), 60 * MINUTES)):
        out = tmp_path / f"out{number}"
        status, printed, seconds = machine.call(out, seconds)
        took.append(round(seconds, 1))
        lines = list(resume.read_lines(out / LINES))
        assert lines[: len(before)] == before
        ended = {(line["step"], line["end"]) for line in before if "end" in line}
        assert not ended & {(line["step"], line.get("begin")) for line in lines[len(before) :]}, took
        files = [path for path in out.rglob("*") if path.is_file()]
        assert len(files) <= FILES
        for path in files:
            assert path.stat().st_size <= BYTES
            assert len(path.relative_to(out).parts) <= DEPTH
            assert re.fullmatch(r"[\w./-]+", str(path.relative_to(out)))
        before = lines
        if (out / LINES).is_file():
            shutil.copy(out / LINES, machine.checkout / ".gpu")
    sys.stdout.write(f"calls of {took} s, the first two killed\n{printed}\n")
    assert status == 0, printed
    assert {line["step"]: line["errors"] for line in lines if line.get("status") == 0} == {name: [] for name in STEPS}
    for step in ("steps", "train"):
        figures = resume.figures(line for line in lines if line["step"] == step)
        assert len({(line["case"], line["metric"]) for line in figures}) == len(figures) > 0
        assert {line["commit"] for line in figures} == {"0123456789ab"}
        assert all(f"{line['metric'][:40]}" in printed for line in figures)
        assert {line["versions"]["jrec"] for line in figures} == {"not installed"}
