"""A sample of the points of ``python -m tests.faults``: a fault leaves the old state, the new one, or a clear error."""

import random
import shutil
import sys

import pytest
from faults.cases import CASES
from faults.durable import unsynced_names
from faults.harness import MODES, trials

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="faults are injected on Linux, by a library that a C compiler (cc) makes",
)


def in_turn(first):
    """A mode of each command but the one of which all are tried, from the so-manieth on."""
    named = enumerate(CASES.items())
    return [(case, how.modes[(3 * n + first) % len(how.modes)]) for n, (case, how) in named if case != "prepare"]


# Every mode of one command, and of each of the others, which take longer, one.
SAMPLE = [("prepare", mode) for mode in MODES] + [pytest.param(*each, marks=pytest.mark.slow) for each in in_turn(0)]


@pytest.fixture(scope="module")
def made():
    """The trials of a case; those of one case at a time."""
    held = {}

    def of(case):
        if case not in held:
            while held:
                held.popitem()[1].__exit__(None, None, None)
            held[case] = trials(CASES[case])
            of.trials = held[case].__enter__()
        return of.trials

    yield of
    for context in held.values():
        context.__exit__(None, None, None)


@pytest.mark.parametrize(("case", "mode"), SAMPLE)
def test_a_fault_leaves_the_old_state_the_new_one_or_a_clear_error(made, case, mode):
    tried = made(case)
    points = tried.points(mode)
    assert points, "no call was met"
    at = random.Random(f"{case} {mode}").randint(1, points)
    result = tried.attempt(mode, at)
    assert result.good, f"python -m tests.faults {case!r} --mode {mode!r} --at {at}: {result.outcome}\n{result.said}"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mode"), in_turn(4))
def test_another_fault_leaves_the_old_state_the_new_one_or_a_clear_error(made, case, mode):
    """Before a release: CI tries the one above."""
    test_a_fault_leaves_the_old_state_the_new_one_or_a_clear_error(made, case, mode)


@pytest.mark.parametrize(
    ("broken", "outcome"), [("third", "third state"), ("silent", "unnamed"), ("trace", "traceback"), ("hang", "hang")]
)
def test_what_is_wrong_is_found(made, broken, outcome):
    """Commands that end as none may, in the place of ``jrec prepare``."""
    seconds = 2 if broken == "hang" else 20
    assert made("prepare").attempt("failing write", 2, command=f"broken {broken}", seconds=seconds).outcome == outcome


@pytest.mark.parametrize("case", ["plan", "checkpoints"])
def test_names_are_given_to_what_is_on_the_disk(made, case):
    """A file and checkpoints; ``Trials.prepare`` checks every case that is tried, and so folders by ``prepare``."""
    made(case)


@pytest.mark.parametrize(
    ("calls", "wrong"),
    [
        (["create a.partial", "fsync a.partial", "rename a a.partial", "fsync ."], []),
        (["create a.partial", "rename a a.partial", "fsync ."], ["a is the name of a.partial, which is not synced"]),
        (
            ["create a.partial", "fsync a.partial", "write a.partial", "rename a a.partial", "fsync ."],
            ["a is the name of a.partial, which is not synced"],
        ),
        (
            ["create a.partial", "fsync a.partial", "rename a a.partial"],
            ["a is a name in ., which is not synced after it"],
        ),
        (["create b", "link a b", "fsync ."], ["a is the name of b, which is not synced"]),
        (
            ["mkdir a.partial", "create a.partial/b", "fsync a.partial/b", "exchange a a.partial", "fsync ."],
            ["a is the name of a.partial, which is not synced"],
        ),
        (
            ["mkdir a.partial", "create a.partial/b", "fsync a.partial", "rename a a.partial", "fsync ."],
            ["a is the name of a.partial/b, which is not synced"],
        ),
        (["mkdir a.partial", "create a.partial/b", "unlink a.partial/b", "rename a.removed a.partial"], []),
    ],
)
def test_names_of_what_is_not_on_the_disk_are_found(tmp_path, calls, wrong):
    listed = [(*line.split(), "")[:3] for line in calls]
    text = "".join(f"{call}\t{tmp_path / path}\t{source and tmp_path / source}\n" for call, path, source in listed)
    assert unsynced_names(tmp_path, text) == wrong
