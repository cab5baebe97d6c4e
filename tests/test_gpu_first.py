"""The first call on a GPU keeps every step's lines, whatever other steps do, and goes on where time ended."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from benchmarks import gpu_first, gpu_tools, harness, resume
from benchmarks.gpu_first import Step

PRELUDE = """
import json, os, pathlib, subprocess, sys, time
from benchmarks import resume
def emit(line):
    print(json.dumps(line), flush=True)
cases = resume.Cases(emit, list(resume.read_lines(pathlib.Path(sys.argv[-1]))))
"""
GOOD = "cases.run({c: lambda c=c: emit({'case': c}) for c in 'abc'})"
RAISES = "cases.run({'a': lambda: emit({'case': 'a'}), 'b': lambda: 1 / 0, 'c': lambda: emit({'case': 'c'})})"
CRASHES = "cases.run({'a': lambda: emit({'case': 'a'}), 'b': os.abort, 'c': lambda: emit({'case': 'c'})})"
HANGS = """
def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    emit({"pid": child.pid})
    sys.stdout.write('{"torn": '); sys.stdout.flush()
    time.sleep(600)
cases.run({'a': lambda: emit({'case': 'a'}), 'b': hang, 'c': lambda: emit({'case': 'c'})})
"""


@pytest.fixture
def first(monkeypatch, tmp_path):
    """Runs a call of one step, a script, and returns what it keeps of it and the lines' cases."""

    def run(name, script, *, minutes=0.5, out="out", earlier=None):
        made = tmp_path / f"{name}_step.py"
        made.write_text(PRELUDE + textwrap.dedent(script))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        command = (made.stem,)
        monkeypatch.setattr(gpu_first, "STEPS", {name: Step(minutes=minutes, command=command, dry=command)})
        go_on = [] if earlier is None else ["--earlier", str(tmp_path / earlier)]
        monkeypatch.setattr(sys, "argv", ["gpu_first", "--out", str(tmp_path / out), *go_on])
        with pytest.raises(SystemExit) as ended:
            gpu_first.main()
        kept = json.loads((tmp_path / out / "outcomes.json").read_text())[name]
        lines = list(resume.read_lines(tmp_path / out / "lines.jsonl"))
        return ended.value.code, kept, [line["case"] for line in lines if "case" in line], lines

    return run


def test_a_step_that_ended_is_not_run_again(first):
    code, kept, cases, lines = first("good", GOOD)
    assert (code, kept["status"], kept["errors"], cases) == (0, 0, [], ["a", "b", "c"])
    assert first("good", GOOD)[3] == lines
    assert first("good", GOOD, out="second", earlier="out")[3] == lines
    assert {line["step"] for line in lines} == {"good"}


def test_a_case_that_raises_fails_the_call_and_keeps_the_others(first):
    code, kept, cases, _ = first("raises", RAISES)
    assert (code, kept["status"], cases) == (1, 0, ["a", "c"])
    assert kept["errors"][0].startswith("b: ZeroDivisionError")


def test_a_crash_costs_its_own_case(first):
    code, kept, cases, _ = first("crashes", CRASHES)
    assert (code, kept["status"], cases) == (1, 0, ["a", "c"])
    assert "did not end in 2 attempts" in kept["errors"][0]


@pytest.mark.slow
def test_what_hangs_is_ended_with_its_children_and_goes_on_later(first):
    code, kept, cases, lines = first("hangs", HANGS, minutes=0.05)
    assert (code, kept["status"], cases) == (1, None, ["a"])
    (pid,) = [line["pid"] for line in lines if "pid" in line]
    time.sleep(0.5)
    status = pathlib.Path(f"/proc/{pid}/stat")
    assert not status.is_file() or status.read_text().split(") ")[1].startswith("Z")  # nobody has waited for it yet
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
    _, kept, cases, _ = first("hangs", HANGS.replace("def hang():", "def hang():\n    return"))
    assert (kept["status"], cases) == (0, ["a", "c"])


def test_a_killed_call_leaves_what_was_printed_and_the_next_goes_on_from_its_folder(first, tmp_path):
    """Killed as a lease ends, at once: every line that a step printed is in the folder, though the call never ended."""
    hangs = "cases.run({'a': lambda: emit({'pid': os.getpid(), 'case': 'a'}), 'b': lambda: time.sleep(600)})"
    (tmp_path / "good_step.py").write_text(PRELUDE + hangs)
    command = """
from benchmarks import gpu_first
gpu_first.STEPS = {"good": gpu_first.Step(minutes=5, command=("good_step",), dry=())}
gpu_first.main()
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path / "killed")}
    call = subprocess.Popen([sys.executable, "-c", command], env=environment, cwd=harness.ROOT, start_new_session=True)
    lines = tmp_path / "killed" / "lines.jsonl"
    until = time.monotonic() + 60
    while not (lines.is_file() and '"begin": "b"' in lines.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    call.kill()
    call.wait()
    (pid,) = [line["pid"] for line in resume.read_lines(lines) if "pid" in line]
    os.kill(pid, signal.SIGKILL)  # a machine that goes back takes the step with it
    assert sorted(path.name for path in lines.parent.iterdir()) == ["lines.jsonl", "log.txt"]
    code, kept, cases, _ = first("good", GOOD, out="second", earlier="killed")
    assert (code, kept["status"], cases) == (0, 0, ["a", "c", "b"])  # what has begun before comes last


NCU = """==PROF== Connected to process 7
a line of the program
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","gather_reduce_short","gpu__time_duration.sum","us","1,234.5"
"0","7","gather_reduce_short","launch__registers_per_thread","register/thread","40"
"1","7","gather_reduce_short","gpu__time_duration.sum","us","9"
"1","7","gather_reduce_short","unknown__metric","us","9"
"""


def test_the_tools_outputs_are_read():
    assert list(gpu_tools.counted(NCU.splitlines())) == [
        ("gather_reduce_short", "duration", 1234.5, "us"),
        ("gather_reduce_short", "registers a thread", 40.0, "register/thread"),
    ]
    assert gpu_tools.findings("========= ERROR SUMMARY: 12 errors") == 12
    assert gpu_tools.findings("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == 0
    assert gpu_tools.findings("a program's own output") is None


def test_a_call_ends_in_time_and_leaves_the_rest_to_the_next(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--out", str(tmp_path), "--minutes", "0.1"])
    with pytest.raises(SystemExit) as ended:
        gpu_first.main()
    assert ended.value.code == 0
    assert "check: left to the next call" in capsys.readouterr().out
    assert not (tmp_path / "outcomes.json").exists()
