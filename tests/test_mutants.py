"""The deliberate breaks of jrec stay applicable, and one that no test notices is reported."""

import json
import sys

import mutants
import pytest


def test_every_mutant_can_be_applied():
    table = mutants.table()
    assert len({mutant["name"] for mutant in table}) == len(table) >= 100
    assert [reason for mutant in table if (reason := mutants.fault(mutant)) is not None] == []
    assert all(mutant["old"] != mutant["new"] for mutant in table)


def test_a_line_that_went_or_is_not_alone_is_named():
    mutant = {"name": "m", "old": "no such line", "new": "", "tests": ["test_nn"]}
    assert "no file of jrec/ has the line 'no such line'" in mutants.fault(mutant)
    assert "give its file" in mutants.fault(mutant | {"old": "import jax"})


@pytest.mark.slow
@pytest.mark.parametrize(("new", "outcome"), [("lr: float = 0.5", "survived"), ("lr: str", "caught")])
def test_outcomes_are_kept(monkeypatch, tmp_path, new, outcome):
    """Of a small tree of one module and one test."""
    (tmp_path / "jrec").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "jrec" / "__init__.py").touch()
    (tmp_path / "jrec" / "one.py").write_text("lr: float = 0.1\n")
    (tmp_path / "tests" / "test_one.py").write_text("from jrec import one\n\n\ndef test():\n    assert one.lr > 0\n")
    table = [{"name": "m", "old": "lr: float = 0.1", "new": new, "tests": ["test_one"]}]
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "table", lambda: table)
    monkeypatch.setattr(sys, "argv", ["mutants", "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        mutants.main()
    assert ended.value.code == int(outcome == "survived")
    assert json.loads((tmp_path / "out.json").read_text())["m"]["outcome"] == outcome
