"""`jrec.fit`: the same bits as the commands, predictions of any rows, and answers to data that cannot be learned."""

import dataclasses
import datetime
import gc
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import shop_logs
from test_crosses import pairs_with_means

import jrec
from jrec import cli
from jrec.app import first_config
from jrec.app.first_choice import FirstChoice, first_choice
from jrec.app.first_config import candidates
from jrec.errors import ConfigError, JrecError
from jrec.prepare.readers import load_schema
from jrec.prepare.readers.guess import guess_schema

LITTLE = {"epochs": 1, "quick": True, "quiet": True, "config": {"model.members": 1, "log.tensorboard": False}}


def frame(rows=900, *, seed=0):
    """Clicks that users and items decide, in the order of their times but for two lines."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 30, rows), rng.integers(0, 20, rows)
    minutes = np.arange(rows)
    minutes[3:4], minutes[-2:-1] = minutes[-2:-1].copy(), minutes[3:4].copy()
    first = datetime.datetime(2024, 5, 1)
    return pd.DataFrame(
        {
            "bought": np.where(rng.random(rows) < np.where(user % 3 == 0, 0.8, 0.2), "yes", "no"),
            "ts": [first + datetime.timedelta(minutes=int(minute)) for minute in minutes],
            "user": [f"u{number}" for number in user],
            "item": item,
            "price": np.where(rng.random(rows) < 0.1, np.nan, rng.gamma(2.0, 10.0, rows)),
        }
    )


@pytest.fixture(scope="module")
def model():
    return jrec.fit(frame(), label="bought", time="ts", **LITTLE)


def test_a_table_is_trained_and_predicted_in_any_order(model):
    assert model.metrics["test"]["examples"] == 90
    assert model.metrics["test"]["auc"] > 0.6
    rows = frame(200, seed=1)
    scores = model.predict(rows)
    assert (scores.dtype, scores.shape) == (np.float32, (200,))
    order = np.random.default_rng(2).permutation(200)
    np.testing.assert_allclose(model.predict(rows.iloc[order].drop(columns="bought")), scores[order], rtol=1e-6)
    new = {"user": ["u3", "nobody"], "item": [1, 10**12], "price": [1.5, None], "ts": ["2024-05-01", "2030-01-01"]}
    assert np.isfinite(model.predict(new)).all()
    assert model.predict(pa.Table.from_pandas(rows)).tolist() == scores.tolist()


def test_an_index_with_a_name_is_a_column():
    model = jrec.fit(frame(300).set_index("user"), label="bought", **LITTLE)
    assert "user" in [feature.name for feature in model.run.restored.schema.categorical]
    rows = frame(50, seed=1)
    assert model.predict(rows.set_index("user")).tolist() == model.predict(rows).tolist()


def test_the_test_split_is_the_last_lines_by_time(model):
    last = frame().sort_values("ts").tail(90)
    metrics = model.evaluate(last)
    for name in ("auc", "log_loss", "positives"):
        assert metrics[name] == pytest.approx(model.metrics["test"][name], rel=1e-6)
    with pytest.raises(ConfigError, match="no label column"):
        model.evaluate(last.drop(columns="bought"))


@pytest.mark.parametrize(("rows", "time", "scored"), [(8, "", ["valid"]), (4, "t", ["test"])])
def test_a_table_so_small_that_a_split_is_empty(rows, time, scored):
    columns = {
        "u": [f"u{row % 2}" for row in range(rows)],
        "t": np.arange(rows) * 86_400 + 1_700_000_000,
        "label": [row // 2 % 2 for row in range(rows)],
    }
    model = jrec.fit(columns, label="label", time=time, quick=True, quiet=True, epochs=1)
    assert list(model.metrics) == scored
    config = (model.folder / "model.toml").read_text()
    assert ("early stopping" in config) == (scored == ["valid"])


def test_several_tables_follow_each_other(model):
    rows = frame(200, seed=1)
    halves = [rows.iloc[:80], pa.Table.from_pandas(rows.iloc[80:])]
    np.testing.assert_allclose(model.predict(halves), model.predict(rows), rtol=1e-6)
    assert model.evaluate(halves)["log_loss"] == pytest.approx(model.evaluate(rows)["log_loss"], rel=1e-6)


def test_a_model_says_what_it_is(model):
    text = repr(model)
    assert re.search(r"jrec model of \d features \(\d tables of \d+ rows\), 720 examples\nfolder: ", text)
    assert re.search(r"\n  valid  AUC 0\.\d+  log loss 0\.\d+\n  test   AUC 0\.", text)
    assert re.sub("<[^>]+>", " ", model._repr_html_()).split() == text.split()
    assert str(model.folder) in text
    assert len(text) < 400


def test_a_saved_model_is_served(model, tmp_path):
    model.save(tmp_path / "export")
    rows = frame(50, seed=3)
    np.testing.assert_allclose(jrec.serving.load(tmp_path / "export")(rows), model.predict(rows), rtol=1e-5)


def test_a_bad_line_advises_nothing_that_python_has_not(tmp_path):
    (tmp_path / "schema.toml").write_text('[label]\ncolumn = "click"\n[[categorical]]\ncolumn = "user"\n')
    (tmp_path / "log.csv").write_text("click,user\n" + "0,a\n1,b\n" * 20 + "what,a\n")
    with pytest.raises(JrecError, match=r"log.csv:42: .*Fix the line, or leave it out of what you give; `jrec prepare"):
        jrec.fit(str(tmp_path / "log.csv"), schema=tmp_path / "schema.toml", **LITTLE)


def test_the_bits_are_those_of_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shop_logs.write_log(tmp_path / "log.csv", 600)
    shop_logs.write_log(tmp_path / "new.csv", 150, seed=1, label=False)
    model = jrec.fit("log.csv", label="click", folder="all", **LITTLE)
    commands = [
        "prepare csv --schema all/schema.toml --input log.csv --split-by random --out data --quiet",
        "init data --quick --out model.toml",
        "train model.toml epochs=1 max_steps=0 model.members=1 log.tensorboard=false log.progress=off out=run",
        "predict run new.csv --out scores.parquet --quiet",
    ]
    for command in commands:
        assert cli.main(command.split()) == 0
    scores = pyarrow.parquet.read_table("scores.parquet")["score"].to_numpy()
    np.testing.assert_array_equal(model.predict("new.csv"), scores)
    np.testing.assert_array_equal(model.predict(pd.read_csv("new.csv")), scores)
    assert jrec.load_run("all/run").predict(pd.read_csv("new.csv")).tolist() == scores.tolist()


def test_a_temporary_folder_goes_with_its_model_and_with_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"unknown key model.embeding_dim; the nearest valid key is model.embedding_dim"
    ):
        jrec.fit(frame(), label="bought", **LITTLE | {"config": {"model.embeding_dim": 8}})
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    model = jrec.fit(frame(300), label="bought", **LITTLE)
    assert capsys.readouterr() == ("", "")
    assert model.folder.parent == tmp_path
    del model
    gc.collect()
    assert not list(tmp_path.glob("jrec-fit-*"))


def test_a_schema_replaces_the_guess(tmp_path):
    shop_logs.write_log(tmp_path / "log.csv", 300)
    (tmp_path / "shop.toml").write_text(shop_logs.TWO_FEATURES)
    model = jrec.fit(tmp_path / "log.csv", schema=tmp_path / "shop.toml", seed=3, **LITTLE)
    assert [feature.name for feature in model.run.restored.schema.categorical] == ["user", "item"]
    assert model.run.restored.config.seed == 3


def test_epochs_win_over_the_steps_of_a_trial(monkeypatch):
    """As a trial writes them, which was best after its first step."""

    def with_steps(*arguments, **options):
        choice = first_choice(*arguments, **options)
        return dataclasses.replace(choice, config=choice.config.replace("epochs =", "max_steps = 2\nepochs =", 1))

    monkeypatch.setattr("jrec.app.first_choice.first_choice", with_steps)
    taken = {}
    for epochs in (None, 1):
        model = jrec.fit(frame(300), label="bought", **LITTLE | {"epochs": epochs})
        taken[epochs] = model.run.restored.saved.step
    assert taken == {None: 2, 1: 4}


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ({}, {"label": "bougt"}, r"table 1 \(pandas.DataFrame\): there is no column 'bougt'; did you mean 'bought'\?"),
        ({}, {"label": "user"}, "the label 'user' has 30 values or more .*, and a label has two"),
        ({"bought": 1}, {}, "give lines of both labels"),
        ({"bought": "maybe"}, {}, "the label 'bought' is maybe in all of the first lines"),
        ({"bought": None}, {}, "the label 'bought' has no value"),
        ({"bought": [1, 0, None] * 100}, {}, "the label 'bought' is missing in some lines"),
        ({}, {"time": "user"}, r"the time 'user' has values such as \['u\d+'\], no times"),
        ({"ts": [None, 5] * 150}, {"time": "ts"}, "the time 'ts' has lines without a time"),
        ({"item": ["a", 1] * 150}, {}, r"table 1 \(pandas.DataFrame\) cannot be read: .* column item"),
        ({}, {"label": ""}, "label is '' and schema is None; give label"),
        ({}, {"label": "", "schema": "x.toml", "time": "ts"}, "time is 'ts', but the schema x.toml says"),
    ],
)
def test_what_cannot_be_learned_is_answered(change, named, message):
    with pytest.raises(JrecError, match=message):
        jrec.fit(frame(300).assign(**change), **{"label": "bought", **LITTLE, **named})


def test_a_folder_in_use_and_an_empty_table_are_refused(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError, match=r"something is already; .* jrec.load_run"):
        jrec.fit(frame(), label="bought", folder=tmp_path, **LITTLE)
    with pytest.raises(JrecError, match="the label 'bought' has no value: the log is empty"):
        jrec.fit(frame(0), label="bought", folder=tmp_path / "new", **LITTLE)


def test_a_log_in_the_order_of_its_labels_has_a_label_beyond_the_first_lines(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("click,user\n" + "0,u1\n0,u2\n" * 6000 + "1,u1\n1,u3\n")
    (tmp_path / "log.toml").write_text(guess_schema(str(path), labels=["click"]))
    schema = load_schema(str(tmp_path / "log.toml"))
    assert schema.label is not None
    assert schema.label.column == "click"


def test_messages_come_where_quiet_is_not_asked_for(capsys):
    jrec.fit(frame(300).assign(thing=np.arange(300) % 7), label="bought", **LITTLE | {"quiet": False})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "jrec: guessed, please check:" in shown.err
    assert "log loss" in shown.err


@pytest.mark.parametrize("better", [True, False])
def test_target_means_of_pairs_are_tried_and_kept_where_they_are_better(tmp_path, monkeypatch, capsys, better):
    lines = pairs_with_means(6_000)
    table = {name: [line[name] for line in lines] for name in ("y", "user", "item")}
    if not better:
        monkeypatch.setattr(FirstChoice, "better_than", lambda one, other: False)
    monkeypatch.setattr("jrec.app.first_trials.STEPS", 200)
    monkeypatch.setattr(first_config, "candidates", lambda facts: candidates(facts)[:1])
    model = jrec.fit(table, label="y", folder=tmp_path / "all", epochs=2)
    said = capsys.readouterr().err
    schema = model.run.restored.schema
    assert [f.name for f in schema.dense] == ["user_item_mean", "user_item_count"] * better
    assert ("[[target_mean]]" in (tmp_path / "all" / "schema.toml").read_text()) == better
    assert ("model.dense_boundaries" in (tmp_path / "all" / "model.toml").read_text()) == better
    kept = "kept" if better else "left out"
    assert re.search(rf"valid log loss 0\.\d+ with them, 0\.\d+ without: they are {kept}\n", said)
    names = {path.name for path in (tmp_path / "all").iterdir()}
    assert names == {"log.arrow", "schema.toml", "data", "model.toml", "model.html", "run"}
    assert model.metrics["test"]["auc"] > 0.8 * better
    assert len(model.predict({"user": ["u1", "nobody"], "item": ["i3", "i4"]})) == 2
