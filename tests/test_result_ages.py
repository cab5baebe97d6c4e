"""No file of results is much older than the modules that it measures, unless a reason is written down."""

import subprocess

import pytest

from benchmarks import ages
from benchmarks.harness import ROOT

FILES = sorted(path.stem for path in ages.RESULTS.glob("*/*.jsonl"))


def test_every_file_of_results_names_what_it_measures():
    said = ages.modules()
    assert sorted(said) == FILES
    absent = [f"{name}: {path}" for name, of in said.items() for path in of["modules"] if not (ROOT / path).exists()]
    assert absent == [], "results/modules.toml names what is not there"


def test_every_file_with_times_of_steps_says_whether_they_are_whole():
    said = ages.modules()
    silent = [
        path.stem
        for path in ages.RESULTS.glob("*/*.jsonl")
        if '"metric": "step' in path.read_text() and "whole_steps" not in said[path.stem]
    ]
    assert silent == []


def test_no_file_of_results_is_old_without_a_reason():
    if not ages.has_history(ROOT):
        pytest.skip("ages are told by the history of the repository, which is not all here")
    found = ages.ages(ROOT)
    old = [
        f"{name}: {age.changed:.0%} changed since {age.commit}"
        for name, age in found.items()
        if age.old and not age.kept
    ]
    assert old == [], "measure anew (CONTRIBUTING.md), or say in results/modules.toml why the file is kept"
    idle = [name for name, age in found.items() if age.kept and not age.old]
    assert idle == [], "results/modules.toml has reasons to keep files that are not old: delete them"


@pytest.fixture
def repository(tmp_path):
    """A repository whose `commit` writes a file and gives the commit's name."""

    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def commit(path, lines):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("".join(f"{line}\n" for line in lines))
        git("add", "--all")
        git("commit", "--quiet", "--message", "one")
        return git("rev-parse", "HEAD")[:12]

    git("init", "--quiet")
    return tmp_path, commit


def test_lines_age_as_their_modules_change(repository):
    root, commit = repository
    first = commit("room/module.py", range(10))
    commit("other.py", range(100))
    second = commit("room/module.py", [*range(8), "a", "b", "c"])
    age = ages.age(root, [second, first], ["room"])
    assert (age.commit, age.commits, age.old) == (first, 1, False)
    assert age.changed == 5 / 11  # two lines gone, three new
    commit("room/module.py", range(100, 111))
    assert ages.age(root, [second, first], ["room"]).old
    assert not ages.age(root, [second], ["other.py"]).old


def test_whole_steps_are_as_old_as_what_trains(repository, monkeypatch):
    root, commit = repository
    monkeypatch.setattr(ages, "TRAINS", ("nn", "run"))
    commit("kernels/module.py", range(1000))
    commit("nn/model.py", range(10))
    first = commit("run/step.py", range(10))
    commit("nn/model.py", range(100, 110))
    assert ages.age(root, [first], ["kernels"]).changed == 0
    age = ages.age(root, [first], ["kernels"], whole_steps=True)
    assert (age.commit, age.commits, age.old) == (first, 1, True)
    assert age.changed == 20 / 20  # ten lines gone, ten new
    last = commit("kernels/module.py", range(2000, 3000))
    assert ages.age(root, [first], ["kernels"], whole_steps=True).changed == 2  # the kernels are older now
    assert not ages.age(root, [last], ["kernels"], whole_steps=True).old


def test_lines_of_a_commit_that_the_history_lacks_are_old(repository):
    root, commit = repository
    commit("module.py", range(10))
    age = ages.age(root, ["0123456789ab"], ["module.py"], "a reason")
    assert (age.commits, age.old, age.kept) == (None, True, "a reason")


def test_a_folder_without_history_has_none(repository, tmp_path_factory):
    root, commit = repository
    commit("module.py", [1])
    assert ages.has_history(root)
    assert not ages.has_history(tmp_path_factory.mktemp("plain"))


def test_readers_are_told_what_is_kept_and_why(monkeypatch):
    said = {"new": {"modules": ["a"]}, "worn": {"modules": ["a"], "kept": "its machine is gone"}}
    monkeypatch.setattr(ages, "modules", lambda: said)
    assert ages.note(["new"]) == ""
    assert ages.note(["worn", "new"]).endswith("has changed since: worn, its machine is gone.")


def test_a_file_that_moves_is_no_older_for_it(repository):
    root, commit = repository
    first = commit("room/module.py", range(100))
    (root / "floor").mkdir()
    (root / "room" / "module.py").rename(root / "floor" / "module.py")
    commit("floor/module.py", [*range(99), "a"])
    assert ages.age(root, [first], ["floor"]).changed == 2 / 100
