"""Which features a score depends on most, against predictions of the same columns with one of them blank."""

import csv
import dataclasses
import pathlib
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import shop_logs
import task_logs
import tbsm_config
import test_taobao_sequences as sequences
from test_importance_kinds import FEW, prepared, trained

import jrec
from jrec import cli
from jrec.app.predict import LoadedRun
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import SequenceOptions, TaobaoSequences

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "importance.md"
COLUMNS = {
    "user": [f"u{number}" for number in range(30)],
    "item": [f"i{number % 7}" for number in range(30)],
    "price": [None, *np.linspace(1, 60, 29).tolist()],
    "history": [[f"i{k}" for k in range(number % 6)] for number in range(30)],
    "strengths": [[0.5] * (number % 6) for number in range(30)],
}
BLANK: dict[str, dict[str, list]] = {name: {name: [None] * 30} for name in ("price", "user", "item")}
BLANK["history"] = {"history": [[]] * 30, "strengths": [[]] * 30}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a log of single values, a number and lists with weights, with its folder."""
    folder = tmp_path_factory.mktemp("why")
    lines = shop_logs.write_log(folder / "log.csv", 1200)
    prepared(folder, shop_logs.SCHEMA, folder / "log.csv")
    return folder, lines, trained(folder, shop_logs.CONFIG, "evaluate.baselines=off", "epochs=2", "data.oov_rate=0.05")


def expected(run, columns, *, task=None):
    """By feature the change of each score when it is blank."""

    def scores(columns):
        found = run.predict(columns)
        return found if task is None else found[task]

    before = scores(columns)
    return {name: before - scores({**columns, **blank}) for name, blank in BLANK.items() if name in columns}


def test_they_are_what_blank_columns_change(run):
    _, _, loaded = run
    changes, reasons = expected(loaded, COLUMNS), loaded.why(COLUMNS, k=4)
    for at, own in enumerate(reasons):
        assert {name for name, _ in own} == set(changes)
        for name, change in own:
            assert change == pytest.approx(changes[name][at], abs=1e-6)
        sizes = [abs(change) for _, change in own]
        assert sizes == sorted(sizes, reverse=True)
    assert dict(reasons[0])["price"] == 0.0  # it was blank already
    assert loaded.why(COLUMNS, k=2) == [own[:2] for own in reasons]
    assert max(abs(change) for own in reasons for _, change in own) > 0.02


@pytest.mark.parametrize("name", ["scores.csv", "scores.parquet"])
def test_the_command_writes_them_beside_the_scores(run, name, tmp_path):
    folder, lines, loaded = run
    out = tmp_path / name
    arguments = ["predict", str(folder / "run"), str(folder / "log.csv"), "--out", str(out), "--quiet"]
    assert cli.main([*arguments, "--why", "2", "--keep", "user"]) == 0
    table = (
        list(csv.DictReader(out.read_text().splitlines())) if out.suffix == ".csv" else pq.read_table(out).to_pylist()
    )
    columns = ["row", "user", "label", "score", "logit", "why_1", "why_1_change", "why_2", "why_2_change"]
    assert list(table[0]) == columns
    raw = {"user": [line["user"] for line in lines], "item": [line["item"] for line in lines]}
    raw |= {"price": [float(line["price"]) if line["price"] else None for line in lines]}
    raw["history"] = [line["history"].split("|") if line["history"] else [] for line in lines]
    raw["strengths"] = [[float(s) for s in line["strengths"].split("|") if s] for line in lines]
    for line, own in zip(table, loaded.why(raw, k=2), strict=True):
        for place, (feature, change) in enumerate(own, 1):
            assert line[f"why_{place}"] == feature
            assert float(line[f"why_{place}_change"]) == pytest.approx(change, abs=1e-6)


def test_of_several_labels_each_has_its_own(tmp_path):
    log = task_logs.columns(2_000)
    prepared(tmp_path, task_logs.SCHEMA, task_logs.write_log(tmp_path / "log.csv", log))
    loaded = trained(tmp_path, task_logs.CONFIG, *FEW)
    columns = {"user": ["user3"] * 30, "item": [f"item{k % 15}" for k in range(30)], "price": [0.25] * 30}
    reasons = loaded.why(columns, k=3)
    assert list(reasons) == ["click", "purchase"]
    for task, own in reasons.items():
        changes = expected(loaded, columns, task=task)
        for at, pairs in enumerate(own):
            assert dict(pairs) == pytest.approx({name: change[at] for name, change in changes.items()}, abs=1e-6)
    out = tmp_path / "scores.parquet"
    (tmp_path / "none.csv").write_text("click,bought,price,user,item\n")
    for file, lines in ((tmp_path / "log.csv", 2_000), (tmp_path / "data", 2_000), (tmp_path / "none.csv", 0)):
        arguments = ["predict", str(tmp_path / "run"), str(file), "--why", "1", "--out", str(out), "--overwrite"]
        assert cli.main([*arguments, "--quiet"]) == 0
        table = pq.read_table(out)
        assert table.num_rows == lines
        assert table.column_names[-4:] == [f"why_1{part}_{task}" for task in reasons for part in ("", "_change")]


@pytest.mark.parametrize("options", [(), ("--growing", "user", "--block-size", "100")])
def test_a_dataset_has_the_reasons_of_its_log(run, tmp_path, options):
    """All splits, whose blocks are no batches, in their order, which is the log's; and a file of one."""
    folder, _, loaded = run
    log = folder / "log.csv"
    if options:
        folder = tmp_path
        prepared(folder, shop_logs.SCHEMA, log, *options)
        loaded = trained(folder, shop_logs.CONFIG, "evaluate.baselines=off", "epochs=1")
    pieces, of_log = [*loaded.of_dataset(why=3)], [*loaded.of_log(str(log), why=3)]
    assert {piece.split for piece in pieces} == {"train", "valid", "test"}
    assert len(pieces) > 3
    for name in ("features", "changes"):
        split, whole = (np.concatenate([getattr(p.reasons, name) for p in each]) for each in (pieces, of_log))
        np.testing.assert_array_equal(split, whole)
    for own, other in zip(pieces, loaded.of_dataset(), strict=True):
        assert (own.split, own.first) == (other.split, other.first)
        np.testing.assert_array_equal(own.logits, other.logits)
        np.testing.assert_array_equal(own.labels, other.labels)
    out = tmp_path / "test.csv"
    arguments = ["predict", str(folder / "run"), str(folder / "data"), "--split", "test", "--why", "1", "--quiet"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    table = list(csv.DictReader(out.read_text().splitlines()))
    assert list(table[0]) == ["split", "row", "label", "score", "logit", "why_1", "why_1_change"]
    names = [own[0][0] for piece in pieces if piece.split == "test" for own in piece.reasons.pairs()]
    assert [line["why_1"] for line in table] == names


def test_examples_of_several_lines_have_reasons(tmp_path):
    """Histories and drawn targets, which only the dataset has; as the columns of its features have them."""
    log = sequences.write(tmp_path / "log.csv", sequences.events(count=1500, users=100, items=900))
    prepare(TaobaoSequences(SequenceOptions()), [log], tmp_path / "data", PrepareOptions(min_count=1, block_size=64))
    arguments = ["train", str(tbsm_config.SHIPPED), f"data.path={tmp_path / 'data'}", f"out={tmp_path / 'run'}"]
    assert cli.main([*arguments, *tbsm_config.SMALL, "log.progress=off", "max_steps=30", "mesh.devices=0"]) == 0
    loaded = jrec.load_run(tmp_path / "run")
    (piece,) = loaded.of_dataset(["test"], why=2)
    rows = sequences.raw_examples(tmp_path / "data", loaded.restored.schema)[-piece.examples :]
    columns = {name: [row[name] for row in rows] for name in sequences.FEATURES}
    for own, pairs in zip(piece.reasons.pairs(), loaded.why(columns, k=2), strict=True):
        assert [name for name, _ in own] == [name for name, _ in pairs]
        assert [change for _, change in own] == pytest.approx([change for _, change in pairs], abs=1e-6)
    assert max(abs(change) for own in piece.reasons.pairs() for _, change in own) > 1e-3


def test_what_has_no_reasons_is_refused(run):
    _, _, loaded = run
    with pytest.raises(ConfigError, match=r"the 5 features that .* predictions read 4: price, user, item, hist"):
        loaded.why(COLUMNS, k=5)
    categorical = [dataclasses.replace(f, fixed_length=f.name == "history") for f in loaded.restored.schema.categorical]
    schema = dataclasses.replace(loaded.restored.schema, categorical=tuple(categorical))
    other = LoadedRun(dataclasses.replace(loaded.restored, schema=schema))
    with pytest.raises(ConfigError, match="'history' has a weight for every value of lists of one length"):
        other.why(COLUMNS, k=1)
    tables = tuple(dataclasses.replace(table, vocabulary=None) for table in loaded.restored.schema.tables)
    schema = dataclasses.replace(loaded.restored.schema, tables=tables)
    synthetic = LoadedRun(dataclasses.replace(loaded.restored, schema=schema))
    with pytest.raises(DatasetError, match=r"table 'user' of .* has no vocabulary: synthetic data has none"):
        next(synthetic.of_dataset(why=1))


def test_the_snippet_of_the_page_runs(tmp_path, monkeypatch, capsys):
    shop_logs.write_log(tmp_path / "log.csv", 1200)
    prepared(tmp_path, shop_logs.TWO_FEATURES, tmp_path / "log.csv")
    trained(tmp_path, shop_logs.CONFIG, "evaluate.baselines=off", "max_steps=5")
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "clicks")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(snippet, PAGE.name, "exec"), {})
    first, second, *reasons = capsys.readouterr().out.splitlines()
    shown = r"(user\+item value|price number) -?[\d.e-]+ [\d.e-]+"
    assert re.fullmatch(shown, first)
    assert re.fullmatch(shown, second)
    assert [bool(re.fullmatch(r"\w+ [+-]0\.\d{3}, \w+ [+-]0\.\d{3}", line)) for line in reasons] == [True, True]
