"""The default run leaves out cases that others cover, and nothing else."""

import ast
import collections
import pathlib
import sqlite3

import cover
import pytest


def bits(*arcs):
    return sum(1 << arc for arc in arcs)


def test_cases_that_add_nothing_or_little_for_their_time_are_left_out():
    cost = {"a.py::cheap": 0.01, "a.py::wide": 3.0, "a.py::same": 4.0, "a.py::narrow": 0.5, "b.py::only": 9.0}
    ran = {"a.py::cheap": bits(0), "a.py::wide": bits(1, 2, 3, 4, 5, 6, 7, 8), "a.py::narrow": bits(1, 9)}
    ran |= {"a.py::same": bits(2, 3), "b.py::only": bits(0)}
    cost["a.py::dear"], ran["a.py::dear"] = 0.6, bits(0, 10)  # a branch of its own, for more than half a second
    kept = cover.chosen(cost, ran, 100)
    assert kept == {"a.py::cheap", "a.py::wide", "a.py::narrow", "b.py::only"}  # of every file at least one


def test_together_they_run_every_branch():
    cost = {f"a.py::{n}": 0.2 + n / 50 for n in range(12)}
    ran = {case: bits(*{n * n % 7, n * 3 % 11, n % 5}) for n, case in enumerate(cost)}
    kept, every, left = cover.chosen(cost, ran, 100), 0, 0
    for case in cost:
        every |= ran[case]
        left |= ran[case] * (case in kept)
    assert left == every
    assert len(kept) < len(cost)


def test_a_case_that_later_choices_made_needless_is_left_out():
    cost = {
        "a.py::first": 0.2,
        "a.py::second": 0.22,
        "a.py::third": 0.24,
    }  # the first has most branches by its time
    ran = {"a.py::first": bits(1, 2, 3, 4), "a.py::second": bits(1, 2, 5), "a.py::third": bits(3, 4, 6)}
    assert cover.chosen(cost, ran, 100) == {"a.py::second", "a.py::third"}


def test_no_more_time_is_spent_than_there_is():
    """What does not fit is passed over, and cheaper ones of fewer branches take its place; free ones stay anyway."""
    cost = {"a.py::free": 0.1, "a.py::dear": 3.0, "a.py::second": 1.0, "a.py::third": 0.9}
    ran = {
        case: bits(*range(10 * n, 10 * n + size)) for n, (case, size) in enumerate(zip(cost, (1, 9, 2, 2), strict=True))
    }
    assert cover.chosen(cost, ran, 4.2) == {"a.py::free", "a.py::dear", "a.py::third"}
    assert cover.chosen(cost, ran, 2.5) == {"a.py::free", "a.py::second", "a.py::third"}
    assert cover.chosen(cost, ran, 0) == {"a.py::free"}


def test_what_was_not_measured_stays_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cover, "FULL", tmp_path / "full.txt")
    cover.FULL.write_text("a.py::before\nb.py::before\n")
    cost = {"a.py::before": 1.0, "a.py::cheap": 0.01, "c.py::x": 2.0, "c.py::y": 3.0}
    ran = {"a.py::before": bits(1, 2), "c.py::x": bits(3), "c.py::y": bits(3)}
    monkeypatch.setattr(cover, "times", lambda folder: cost)
    monkeypatch.setattr(cover, "covered", lambda folder: ran)
    cover.choose(tmp_path, 100, write=True)
    assert cover.left_to_full() == {"b.py::before", "c.py::y"}
    assert "3 of 4 cases stay, 3 of 6 CPU seconds; they run 3 of 3 branches" in capsys.readouterr().out


def test_branches_are_told_apart_by_file_and_case(tmp_path):
    for worker, rows in {"gw0": [(1, 1, 1, 2), (1, 2, 1, 2)], "gw1": [(2, 1, 1, 2), (2, 1, 2, 3)]}.items():
        with sqlite3.connect(tmp_path / f"coverage.{worker}") as database:
            database.execute("create table file (id integer, path text)")
            database.execute("create table context (id integer, context text)")
            database.execute("create table arc (file_id integer, context_id integer, fromno integer, tono integer)")
            database.executemany("insert into file values (?, ?)", [(1, "one"), (2, "two")])
            database.executemany("insert into context values (?, ?)", [(1, "x"), (2, "y")])
            database.executemany("insert into arc values (?, ?, ?, ?)", rows)
        database.close()
    found = cover.covered(tmp_path)
    assert {case: arcs.bit_count() for case, arcs in found.items()} == {"x": 3, "y": 1}
    assert found["x"] & found["y"] == found["y"]


def test_every_case_that_is_left_out_exists():
    named = collections.defaultdict(set)
    for case in cover.left_to_full():
        file, _, rest = case.partition("::")
        named[file].add(rest.partition("[")[0])
    for file, functions in named.items():
        tree = ast.parse((cover.ROOT / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert functions <= defined, f"{file}: python -m tests.cover measures anew which cases others stand for"


def test_cases_that_are_left_out_are_marked(pytestconfig, request):
    full = cover.left_to_full()
    if not full:
        pytest.skip("no case is left out")
    marked = {item.nodeid for item in request.session.items if item.get_closest_marker("full")}
    assert full & {item.nodeid for item in request.session.items} <= marked  # files may mark cases of their own, too
    assert pathlib.Path(pytestconfig.rootpath) == cover.ROOT
