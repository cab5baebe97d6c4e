"""``python -m benchmarks.oper`` on small logs: every part, and the figures it exists for."""

import json
import sys

import pytest

from benchmarks import oper
from jrec.data.schema import Schema

SMALL = oper.Log(name="kaggle", rows={"a": 200_000, "b": 4000, "c": 30}, dim=8, examples=3_000_000)


@pytest.mark.slow
def test_every_part_reports(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(oper, "logs", lambda: {"kaggle": SMALL})
    monkeypatch.setattr(oper, "MILP_CASES", oper.MILP_CASES[:1])
    arguments = ["oper", "--quick", "--milp-seconds", "1", "--figures", str(tmp_path), "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", arguments)
    oper.main()
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(r["case"], r["metric"]): r["value"] for r in results}
    for part in ("table 2", "table 3", "milp", "figure 10", "plan from row counts"):
        assert any(metric.startswith(part) for _, metric in found), part
    case = "kaggle, power law 1.05"
    assert found[f"{case}, oper, threshold 0.1 %", "table 3: degree of balance, links"] >= 99.5
    means = [found[f"{case}, inference, extra {100 * e:g} %", "table 2: mean a link"] for e in oper.EXTRA]
    assert means == sorted(means, reverse=True)
    assert means[0] > 3 * means[1]
    assert "<svg" in (tmp_path / "figure10_kaggle.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), [("kaggle", "criteo_kaggle_80k.tsv.gz"), ("avazu", "avazu_9k.csv.gz")])
def test_real_samples_are_planned(shared_data, tmp_path, kind, file):
    log, profile = oper.real_counts(kind, shared_data / file, tmp_path)
    assert {t.name: t.rows for t in Schema.load(tmp_path / kind).tables} == log.rows
    problem = oper.problem_of(log, profile)
    cost = oper.plan_placement(problem).cost
    assert min(cost.memory_balance, cost.lookup_balance, cost.communication_balance) >= 0.99
    none = oper.plan_placement(oper.problem_of(log, profile, extra_memory=0.0)).cost
    assert cost.remote_bytes.mean() < 0.5 * none.remote_bytes.mean()
