"""Progress where there is no terminal: a line after a while, then less and less often, and none if not asked for."""

import itertools
import types

import pytest

from jrec import progress
from jrec.app.progress import TrainingProgress
from jrec.progress import Progress, Pulse, counted


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; ``clock.now`` moves it."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def test_lines_come_after_ten_seconds_and_at_least_each_minute(clock):
    pulse, said = Pulse(None), []
    for second in range(1000):
        clock.now = 100.0 + second
        if pulse.due():
            said.append(second)
    gaps = [after - before for before, after in itertools.pairwise(said)]
    assert said[0] == progress.FIRST == 10
    assert gaps == sorted(gaps)
    assert gaps[-1] == progress.MOST == 60
    assert 20 < len(said) < 40


def test_training_says_where_it_is(clock, capsys):
    with TrainingProgress("auto", total=400, start=100) as shown:
        for _ in range(30):
            clock.now += 1
            shown.advance(1, 64, 0.51234, lambda: 0.75)
        clock.now += 30
        with shown.evaluating("valid", 7) as advance:
            advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "jrec: step 110 of 400, 64 examples/s, loss 0.5123, AUC 0.7500, about 4.8 min left"
    assert lines[1].startswith("jrec: step 120 of 400, 64 examples/s")
    assert lines[-1] == "jrec: evaluate valid: batch 1 of 7"
    assert len(lines) == 4


@pytest.mark.parametrize("mode", ["off", "on"])
def test_who_asks_for_none_or_for_a_bar_gets_no_lines(mode, clock, capsys):
    with TrainingProgress(mode, total=400, start=0) as shown:
        for _ in range(30):
            clock.now += 1
            shown.advance(1, 64, None, lambda: None)
    assert "jrec:" not in capsys.readouterr().err


def test_stages_and_counts_say_how_far_they_are(clock, capsys):
    with Progress().stage("reading", total=200.0) as advance, counted("scoring", None) as more:
        for done in range(0, 200, 10):
            clock.now += 1
            advance(done)
            more(1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "jrec: reading: 45 %",
        "jrec: scoring: 10,000 examples",
        "jrec: reading: 95 %",
        "jrec: scoring: 20,000 examples",
    ]
    with Progress(show=False).stage("reading", total=200.0) as advance, counted("scoring", 5, show=False) as more:
        clock.now += 100
        advance(1)
        more(1)
    assert not capsys.readouterr().err
