"""The survey of a GPU keeps every step's results, whatever other steps do, and goes on where time ended."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from benchmarks import gpu_kernels_check, gpu_survey, gpu_tests, resume, survey_process, survey_steps, survey_summary
from benchmarks.survey_steps import STEPS, Step

ROOT = pathlib.Path(__file__).resolve().parents[1]

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
from benchmarks import resume
def emit(line):
    print(json.dumps(line), flush=True)
def measure(case, value=1.0):
    emit({"case": case, "metric": "time", "value": value, "unit": "us"})
cases = resume.Cases(emit, list(resume.read_lines(pathlib.Path(sys.argv[-1]))))
"""
GOOD = "cases.run({c: lambda c=c: measure(c) for c in ('a', 'b', 'c')})"
RAISES = "cases.run({'a': lambda: measure('a'), 'b': lambda: 1 / 0, 'c': lambda: measure('c')})"
CRASHES = "cases.run({'a': lambda: measure('a'), 'b': lambda: os.kill(os.getpid(), 11), 'c': lambda: measure('c')})"
HANGS = """
def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    emit({"pids": [os.getpid(), child.pid]})
    time.sleep(600)
cases.run({'a': lambda: measure('a'), 'b': hang, 'c': lambda: measure('c')})
"""
GARBAGE = r"""
sys.stdout.buffer.write(b"\xff\xfe not JSON\n[1, 2]\n{\"torn\": \n{\"value\": NaN}\n" + b"x" * 200_000 + b"\n")
sys.stdout.flush()
print("to stderr", file=sys.stderr)
cases.run({'a': lambda: measure('a')})
sys.stdout.write("no newline at the end")
"""
SLOW = """
def slow(c):
    measure(c); time.sleep(0.5)
cases.run({c: lambda c=c: slow(c) for c in 'abcdefgh'})
"""


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch):
    monkeypatch.setattr(survey_process, "GRACE", 0.5)


def _command(script):
    return sys.executable, "-c", PRELUDE + textwrap.dedent(script)


def _step(name, script, *, minutes=0.5, **options):
    command = _command(script)
    return Step(name=name, minutes=minutes, command=command, dry=command, **options)


def _survey(folder, *steps, minutes=2.0):
    made = gpu_survey.survey(steps, folder, minutes=minutes, dry=False)
    return {step["step"]: step for step in made["steps"]}


def _lines(folder, name):
    return list(resume.read_lines(folder / f"{name}.jsonl"))


def _measured(folder, name):
    return [line["case"] for line in _lines(folder, name) if "metric" in line]


def _gone(pid):
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = pathlib.Path(f"/proc/{pid}/stat")
        if status.is_file() and status.read_text().split(") ")[1].startswith("Z"):
            return True  # nobody has waited for it yet
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_steps_that_hang_crash_and_print_garbage_leave_the_others_results(tmp_path, capsys):
    found = _survey(
        tmp_path,
        _step("first", GOOD), _step("hangs", HANGS, minutes=0.08), _step("crashes", CRASHES),
        _step("garbage", GARBAGE), _step("raises", RAISES), _step("last", GOOD),
    )  # fmt: skip
    outcomes = {name: step["outcome"] for name, step in found.items()}
    assert outcomes == {
        "first": "ended", "hangs": "timeout", "crashes": "ended", "garbage": "ended", "raises": "ended",
        "last": "ended",
    }  # fmt: skip
    assert _measured(tmp_path, "first") == _measured(tmp_path, "last") == ["a", "b", "c"]
    # What hangs is ended with its children, and what it measured before stays.
    assert _measured(tmp_path, "hangs") == ["a"]
    (pids,) = [line["pids"] for line in _lines(tmp_path, "hangs") if "pids" in line]
    assert all(_gone(pid) for pid in pids)
    assert found["hangs"]["open"] == ["b"]
    # A crash costs its own case alone, which is tried once more after the others.
    assert _measured(tmp_path, "crashes") == ["a", "c"]
    assert found["crashes"]["errors"] == [
        {"case": "b", "error": "did not end in 2 attempts: it hangs, crashes, or needs more time"}
    ]
    assert _measured(tmp_path, "garbage") == ["a"]
    stop = _lines(tmp_path, "garbage")[-1]
    assert stop["garbage"] >= 5
    assert "to stderr" in stop["tail"]
    assert found["raises"]["errors"][0]["error"].startswith("ZeroDivisionError")
    assert _measured(tmp_path, "raises") == ["a", "c"]
    # Every line of every file is JSON, and the summary is there and printed.
    for file in tmp_path.glob("*.jsonl"):
        assert all(isinstance(json.loads(line), dict) for line in file.read_text().splitlines())
    assert json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert "did not end in 2 attempts" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.slow
def test_a_second_run_goes_on_at_the_next_case(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_survey, "MIN_SECONDS", 1.0)
    slow, last = _step("slow", SLOW, minutes=1), _step("last", GOOD)
    first = _survey(tmp_path, slow, last, minutes=0.04)
    assert first["slow"]["outcome"] == "timeout"
    assert first["last"]["outcome"] == "not begun"
    before = _lines(tmp_path, "slow")
    ended = [line["end"] for line in before if "end" in line]
    assert 0 < len(ended) < 8
    second = _survey(tmp_path, slow, last)
    assert (second["slow"]["outcome"], second["last"]["outcome"]) == ("ended", "ended")
    after = _lines(tmp_path, "slow")
    assert after[: len(before)] == before
    begun = [line["begin"] for line in after[len(before) :] if "begin" in line]
    # What ended is not run again; the case that was cut off comes last.
    assert sorted(begun) == sorted(set("abcdefgh") - set(ended))
    assert begun[-1:] == (first["slow"].get("open") or begun[-1:])
    assert second["slow"]["cases"] == 8
    third = _survey(tmp_path, slow, last)
    assert third["slow"]["lines"] == second["slow"]["lines"]


@pytest.mark.slow
def test_a_survey_that_is_ended_leaves_a_summary_and_no_process(tmp_path):
    script = f"""
        import signal
        from benchmarks import gpu_survey, survey_steps
        command = {_command(HANGS)!r}
        survey_steps.STEPS = (survey_steps.Step(name="smoke", minutes=1, command=command, dry=command),)
        gpu_survey.main()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(script), "--out", str(tmp_path)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        for _ in range(200):
            pids = [line["pids"] for line in _lines(tmp_path, "smoke") if "pids" in line]
            if pids:
                break
            time.sleep(0.1)
        driver.send_signal(signal.SIGTERM)
        out, _ = driver.communicate(timeout=30)
    assert driver.returncode == 128 + signal.SIGTERM
    assert all(_gone(pid) for pid in pids[0])
    assert "cut off" in out
    (step,) = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert (step["outcome"], step["cases"], step["open"]) == ("cut off", 1, ["b"])


@pytest.mark.slow
def test_a_step_that_prints_nothing_is_ended_and_another_one_is_not(tmp_path):
    stalls = _step("stalls", HANGS, minutes=1, stall=1.0)
    talks = _step("talks", "for _ in range(12): time.sleep(0.2); print('.', file=sys.stderr, flush=True)\n" + GOOD,
                  stall=1.5)  # fmt: skip
    found = _survey(tmp_path, stalls, talks)
    assert found["talks"]["outcome"] == "ended"
    assert found["stalls"]["cases"] == 2  # "a", and "c" after the stall in "b"
    assert _measured(tmp_path, "stalls") == ["a", "c"]


def test_a_step_without_lines_is_not_taken_for_done(tmp_path):
    found = _survey(tmp_path, _step("empty", "print('skipped: there is no GPU', file=sys.stderr)"))
    assert found["empty"]["outcome"] == "empty"
    assert "there is no GPU" in found["empty"]["tail"]
    assert not survey_steps.state(tmp_path / "empty.jsonl").done
    drawn = "skipped: there is no GPU\n┏━━━━━━┓\n│ case │\n└──────┘\n"
    assert survey_summary._last_words(drawn) == "skipped: there is no GPU"


def test_torn_lines_are_closed_and_files_stay_small(tmp_path, monkeypatch):
    step = _step("torn", GOOD)
    file = tmp_path / "torn.jsonl"
    file.write_text('{"survey": "start", "dry": false}\n{"begin": "a"}\n{"end": "a", "sec')
    _survey(tmp_path, step)
    assert _measured(tmp_path, "torn") == ["b", "c", "a"]  # "a" had begun before
    monkeypatch.setattr(gpu_survey, "MAX_FILE", 3000)
    folder = tmp_path / "other"
    _survey(folder, _step("much", "for i in range(1000): measure(str(i))"))
    assert (folder / "much.jsonl").stat().st_size < 4000
    assert _lines(folder, "much")[-1]["dropped"] > 900


def test_results_of_a_dry_run_and_other_files_are_not_mixed_in(tmp_path):
    gpu_survey.survey([_step("smoke", GOOD)], tmp_path, minutes=1, dry=True)
    with pytest.raises(SystemExit, match="holds results of a dry run"):
        _survey(tmp_path, _step("smoke", GOOD))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(SystemExit, match=r"thesis\.tex"):
        _survey(other, _step("smoke", GOOD))


def test_time_is_shared_in_order():
    a, b, c = (_step(name, GOOD, minutes=minutes) for name, minutes in (("a", 2), ("b", 3), ("c", 1)))
    assert survey_steps.limit(a, [b, c], 360) == 120
    assert survey_steps.limit(a, [b, c], 420) == 180  # a minute is left over
    assert survey_steps.limit(b, [c], 100) == 100
    assert survey_steps.limit(c, [], 0) == 0


def test_steps_that_had_no_chance_come_first(tmp_path):
    steps = [_step(name, GOOD) for name in ("ended", "spent", "cut", "failed", "new")]
    text = {
        "ended": {"outcome": "ended", "whole": True}, "spent": {"outcome": "timeout", "whole": True},
        "cut": {"outcome": "timeout", "whole": False}, "failed": {"outcome": "crashed", "whole": False},
    }  # fmt: skip
    for name, stop in text.items():
        lines = [{"survey": "start", "dry": False}, {"survey": "stop", "seconds": 1.5, **stop}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    states = {step.name: survey_steps.state(tmp_path / f"{step.name}.jsonl") for step in steps}
    assert [step.name for step in survey_steps.order(steps, states)] == ["cut", "new", "spent", "failed"]
    assert states["cut"].seconds == 1.5


def test_the_steps_fit_half_an_hour_and_eight_files():
    assert sum(step.minutes for step in STEPS) == 28
    assert len(STEPS) + 1 <= 8
    assert [step.name for step in STEPS] == ["smoke", "tests", "kernels", "benchmark", "tuning", "step", "tt"]


def test_output_that_never_ends_a_line_is_cut(tmp_path):
    ending = survey_process.run(
        [sys.executable, "-c", "import sys\nfor _ in range(50): sys.stdout.write('x' * 100_000)"],
        environment=os.environ, folder=tmp_path, take=lambda line: None, timeout=20, stall=20,
    )  # fmt: skip
    assert (ending.outcome, ending.lines) == ("ended", 0)
    assert len(ending.tail) <= 4000


@pytest.mark.parametrize("verdicts", [[{"right": True}, {"right": False}], []])
def test_verdicts_are_lines_of_a_step_and_without_one_it_failed(monkeypatch, capsys, verdicts):
    printed = "".join(json.dumps(verdict) + "\n" for verdict in verdicts)
    command = (sys.executable, "-c", f"import sys; print({printed!r}, end=''); sys.exit(1)")
    monkeypatch.setattr(gpu_kernels_check, "CHECK", command)
    monkeypatch.setattr(sys, "argv", ["gpu_kernels_check"])
    with contextlib.nullcontext() if verdicts else pytest.raises(SystemExit, match="status 1 and no verdict"):
        gpu_kernels_check.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [*({"verdict": verdict} for verdict in verdicts), {"status": 1, "verdicts": len(verdicts)}]


def _gpu_tests(tmp_path, text, *arguments):
    file = tmp_path / "test_made.py"
    file.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "benchmarks.gpu_tests", "--files", str(file), "--mark", "not nothing", *arguments]
    environment = {**os.environ, "PYTEST_ADDOPTS": "-p no:randomly"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment, timeout=120)
    return done, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_test_of_a_gpu_is_a_line_and_a_crash_costs_one(tmp_path):
    text = """
        import os, pytest
        def test_passes(): pass
        def test_fails(): assert 1 + 1 == 3
        def test_is_skipped(): pytest.skip("no reason")
        def test_crashes(): os.kill(os.getpid(), 11)
        def test_a_table_past_32_bits(): pass
    """
    _, lines = _gpu_tests(tmp_path, text, "--workers", "2")
    ended = {line["end"].rpartition("::")[2]: line for line in lines if "end" in line}
    assert {name: line["outcome"] for name, line in ended.items()} == {
        "test_passes": "passed", "test_fails": "failed", "test_is_skipped": "skipped", "test_crashes": "failed",
        "test_a_table_past_32_bits": "passed",
    }  # fmt: skip
    assert "assert (1 + 1) == 3" in ended["test_fails"]["error"]
    assert ended["test_is_skipped"]["reason"] == "Skipped: no reason"
    order = [line["end"] for line in lines if "end" in line]
    assert order[-1].endswith("past_32_bits")
    # A second run has nothing left to do.
    earlier = tmp_path / "tests.jsonl"
    earlier.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, again = _gpu_tests(tmp_path, text, "--workers", "0", "--earlier", str(earlier))
    assert not any("begin" in line for line in again)


def test_files_with_tests_of_a_gpu_are_found():
    assert {"tests/test_gpu_kernels.py", "tests/test_gpu_tt.py"} <= set(gpu_tests.gpu_files())


@pytest.mark.slow
def test_a_dry_run_with_broken_steps_keeps_what_others_measured(tmp_path):
    """The survey's own steps at tiny sizes, three of them replaced by one that hangs, one that crashes, and garbage."""
    broken = {"tests": _step("tests", HANGS, minutes=0.1), "kernels": _step("kernels", CRASHES),
              "step": _step("step", GARBAGE)}  # fmt: skip
    steps = [
        dataclasses.replace(step, dry=broken[step.name].dry, minutes=broken[step.name].minutes)
        if step.name in broken
        else step
        for step in STEPS
    ]
    steps = [dataclasses.replace(step, earlier=True) for step in steps]
    made = gpu_survey.survey(steps[:3], tmp_path, minutes=5, dry=True)
    assert {s["step"]: s["outcome"] for s in made["steps"]} == {
        "smoke": "ended",
        "tests": "timeout",
        "kernels": "ended",
    }
    made = gpu_survey.survey(steps, tmp_path, minutes=15, dry=True)
    found = {step["step"]: step for step in made["steps"]}
    for name in ("smoke", "benchmark", "tuning", "tt"):
        assert found[name]["outcome"] == "ended", found[name]
        assert found[name]["failed"] == 0, found[name]
        assert found[name]["cases"] > 0
    assert found["tests"]["cases"] == 2  # "a", and in the second run "c" before "b" hangs again
    assert {p["metric"] for p in found["smoke"]["figures"]} >= {"bandwidth", "pallas, largest difference"}
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 8
    assert all(path.stat().st_size < 16 << 20 for path in tmp_path.iterdir())
    assert "summary.json" in files
    assert survey_summary.table(made)
