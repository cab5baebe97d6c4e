"""The first call on a GPU keeps every step's lines, whatever other steps do, and goes on where time ended."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from random import Random

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
        step = Step(minutes=minutes, least=0.01, command=command, dry=command)
        monkeypatch.setattr(gpu_first, "STEPS", {name: step})
        go_on = [] if earlier is None else ["--earlier", str(tmp_path / earlier)]
        monkeypatch.setattr(sys, "argv", ["gpu_first", "--out", str(tmp_path / out), "--only", name, *go_on])
        with pytest.raises(SystemExit) as ended:
            gpu_first.main()
        lines = list(resume.read_lines(tmp_path / out / "lines.jsonl"))
        kept = [line for line in lines if "status" in line][-1]
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


SLOW = """
def measured(case):
    for metric in "xyz":
        time.sleep(0.1)
        emit({"case": case, "metric": metric, "value": os.getpid(), "unit": "x"})
        with open("printed", "a") as file:
            print(STEP, case, metric, file=file)
cases.run({c: lambda c=c: measured(c) for c in 'abc'})
"""
CALL = """
from benchmarks import gpu_first
gpu_first.STEPS = {
    name: gpu_first.Step(minutes=5, least=0.01, command=(f"{name}_step",), dry=()) for name in ("first", "second")
}
gpu_first.harness.ROOT = gpu_first.pathlib.Path.cwd()
import sys
sys.argv += ["--only", "first", "second"]
gpu_first.main()
"""


def kill_session(leader):
    """Ends all processes of a session at once, as where a machine is taken back."""
    left = True
    while left:  # a process may have begun while others ended
        left = False
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                status = (folder / "stat").read_text().rpartition(") ")[2].split()
                if status[0] != "Z" and int(status[3]) == leader:
                    os.kill(int(folder.name), signal.SIGKILL)
                    left = True


def test_calls_killed_at_any_moment_lose_no_line_and_repeat_no_case_that_ended(tmp_path):
    random = Random(0)
    for name in ("first", "second"):
        (tmp_path / f"{name}_step.py").write_text(f"STEP = {name!r}" + PRELUDE + SLOW)
    path = os.pathsep.join([str(harness.ROOT), str(tmp_path)])
    before = None
    for number in range(7):
        out = tmp_path / f"out{number}"
        environment = {**os.environ, "PYTHONPATH": path, "OUT": str(out)}
        go_on = [] if before is None else ["--earlier", str(before)]
        call = subprocess.Popen([sys.executable, "-c", CALL, *go_on], env=environment, cwd=tmp_path,
                                start_new_session=True, stdout=subprocess.PIPE)  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            call.wait(random.uniform(0.4, 1.6) if number < 6 else 60)
        kill_session(call.pid)
        said = call.communicate()[0].decode().partition("All figures")[0]
        if not (out / "lines.jsonl").exists():  # killed while it began
            continue
        assert {path.name for path in out.iterdir()} <= {"lines.jsonl", "log.txt", "lines.jsonl.new"}
        if before is not None:  # what was there stays, and a case that ended does not begin again
            old, new = (list(resume.read_lines(folder / "lines.jsonl")) for folder in (before, out))
            assert new[: len(old)] == old
            ended = {(line["step"], line["end"]) for line in old if "end" in line}
            new = new[len(old) :]
            assert not any((line["step"], line.get("begin")) in ended for line in new)
            # Of the last figure the file may be written, and not yet the output.
            assert 0 <= sum("value" in line for line in new) - len(re.findall(r" x$", said, re.MULTILINE)) <= 1
        before = out
    assert call.returncode == 0
    lines = list(resume.read_lines(before / "lines.jsonl"))
    assert [line["errors"] for line in lines if "status" in line] == [[], []]
    figures = [(s, line["case"], line["metric"]) for s in ("first", "second")
               for line in resume.figures(line for line in lines if line["step"] == s)]  # fmt: skip
    assert sorted(figures) == sorted((s, c, m) for s in ("first", "second") for c in "abc" for m in "xyz")
    printed = (tmp_path / "printed").read_text().split("\n")[:-1]
    kept = {f"{line['step']} {line['case']} {line['metric']}" for line in lines if "value" in line}
    assert kept == set(printed)
    assert len([line for line in lines if "value" in line]) >= len(printed) - 6  # a kill may take what is on its way


def test_a_case_is_not_to_blame_where_its_call_was_killed():
    lines = [{"begin": "a"}, {"end": "a"}, {"begin": "b"}]
    assert resume.cut_off(lines) == "b"
    for closed in ({"cut": "b"}, {"end": "b", "error": "x"}, {"status": None}):
        assert resume.cut_off([*lines, closed]) is None
    cut = [*lines, {"cut": "b"}, {"begin": "b"}, {"cut": "b"}]
    assert resume.Cases(print, cut).pending("abc") == ["c", "b"]
    assert resume.Cases(print, [*lines, {"begin": "b"}]).pending("abc") == ["c"]


def test_the_next_call_says_what_a_killed_one_cut_off(first, tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "lines.jsonl").write_text('{"step": "good", "begin": "a"}\n{"step": "good", "metr')
    _, kept, cases, lines = first("good", GOOD, earlier="killed")
    assert lines[:2] == [{"step": "good", "begin": "a"}, {"step": "good", "cut": "a"}]
    assert (kept["errors"], cases) == ([], ["b", "c", "a"])


def test_figures_of_a_call_are_kept_for_the_pages(tmp_path, monkeypatch):
    def figure(case, value, device="NVIDIA H200; a CPU"):
        return {"case": case, "metric": "step", "value": value, "unit": "us", "device": device, "commit": "new"}

    lines = [{"begin": "a"}, figure("a", 1.0), {"cut": "a"}, {"begin": "a"}, figure("a", 2.0), {"end": "a"}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"step": "steps", **line}) + "\n" for line in lines))
    kept = tmp_path / "h200" / "gpu_step.jsonl"
    kept.parent.mkdir()
    kept.write_text("".join(json.dumps(line) + "\n" for line in (figure("a", 7.0), figure("old", 3.0))))
    assert gpu_first.keep(tmp_path, tmp_path) == [kept]
    assert list(resume.read_lines(kept)) == [figure("a", 2.0), figure("old", 3.0)]
    cpu = json.dumps({"step": "steps", **figure("a", 1.0, device="a CPU")})
    (tmp_path / "lines.jsonl").write_text(cpu)
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        gpu_first.keep(tmp_path, tmp_path)


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


def test_what_matters_most_fits_into_the_first_call():
    minutes = [step.minutes for step in gpu_first.STEPS.values()]
    assert list(gpu_first.STEPS)[:4] == ["check", "steps", "train", "counters"]
    assert sum(minutes[:4]) <= 9
    assert minutes[0] + gpu_first.STEPS["steps"].least <= 4  # until the first figures of whole steps


def test_steps_that_do_not_fit_into_what_is_left_are_skipped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--out", str(tmp_path), "--minutes", "0.1"])
    with pytest.raises(SystemExit) as ended:
        gpu_first.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "check: skipped: it needs 0.7 minutes, and 0.1 are left" in said
    assert "sanitizer" not in said  # a call of its own
    assert not list(resume.read_lines(tmp_path / "lines.jsonl"))
