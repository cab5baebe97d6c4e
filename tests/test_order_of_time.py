"""Training in order of time: when examples were, windows that are scored before they are learnt from, their report."""

import contextlib
import dataclasses
import datetime
import io
import json
import math

import numpy as np
import pytest
from test_train_sequences import CONFIG as ITEMS_CONFIG
from test_train_sequences import SCHEMA as ITEMS_SCHEMA
from test_train_sequences import write_log as write_log_of_items

from jrec import cli
from jrec.app.config import load_config
from jrec.app.evaluate import restore_run, score_split
from jrec.app.progress import TrainingProgress
from jrec.app.progressive import moment, windows_of
from jrec.app.report import progressive
from jrec.app.report.logs import read_records
from jrec.app.schedule import Schedule
from jrec.data.moments import STRIDE, Moments, duration_seconds, save_moments
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError
from jrec.files import sha256_of
from jrec.metrics import evaluate

SCHEMA = """
[label]
column = "label"
[time]
column = "ts"
format = "{format}"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
CONFIG = """
[data]
batch_size = 64
eval_batch_size = 256
order = "time"
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [8, 1]
calibrate = true
[optimizer]
name = "adam"
learning_rate = 0.01
[optimizer.embedding]
learning_rate = 0.1
[evaluate]
every_steps = 30
progressive = "1d"
baselines = "off"
[log]
tensorboard = false
"""
BEGIN = datetime.datetime(2024, 5, 1, 6)
DAY = 86_400


def moments_of_log(rows=4_000, days=8):
    """Seconds since 1970 of the lines, ascending."""
    rng = np.random.default_rng(0)
    begin = int((BEGIN - datetime.datetime(1970, 1, 1)).total_seconds())
    return begin + np.sort(rng.integers(0, days * DAY, rows))


def write_log(path, *, form="iso"):
    """A log in which items' tastes turn round after two days."""
    moments, rng = moments_of_log(), np.random.default_rng(1)
    user, item = rng.integers(0, 30, len(moments)), rng.integers(0, 20, len(moments))
    taste = rng.normal(size=20) * 2
    sign = np.where(moments < moments[0] + 2 * DAY, 1, -1)
    label = rng.random(len(moments)) < 1 / (1 + np.exp(-sign * taste[item]))
    shown = {"iso": lambda m: datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=int(m))}.get(form, int)
    lines = [f"{int(a)},{shown(m)},u{b},i{c}" for a, m, b, c in zip(label, moments, user, item, strict=True)]
    path.write_text("\n".join(["label,ts,user,item", *lines]) + "\n")
    return path


def prepare(folder, out, *options, form="iso"):
    (folder / f"{out}.toml").write_text(SCHEMA.format(format=form))
    log = write_log(folder / f"{out}.csv", form=form)
    given = ["--schema", str(folder / f"{out}.toml"), "--input", str(log), "--out", str(folder / out), "--quiet"]
    assert cli.main(["prepare", "csv", *given, *options]) == 0
    return folder / out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("order_of_time")
    prepare(folder, "data")
    (folder / "run.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """A finished run, and what its command printed."""
    return folder / "run", train(folder, "run")


def train(folder, name, *changes, code=0):
    """Trains by `jrec train`; returns what the command printed, or its error."""
    arguments = [str(folder / "run.toml"), f"data.path={folder / 'data'}", f"out={folder / name}", *changes]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main(["train", *arguments]) == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


def config_of(folder, *changes):
    return load_config(folder / "run.toml", [f"data.path={folder / 'data'}", f"out={folder / 'none'}", *changes])


def progressive_records(run):
    return [record for record in read_records(run / "metrics.jsonl") if record["split"] == "progressive"]


@pytest.mark.parametrize(("text", "seconds"), [("1d", DAY), ("12h", 43_200), ("90m", 5_400), ("1s", 1)])
def test_durations(text, seconds):
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "0d", "1", "1w", "-1d", "1.5d", "²d", "99999999999d", "37000d"])
def test_what_is_no_duration(text):
    assert duration_seconds(text) is None


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 1000])
def test_moments_are_found_to_a_stride(tmp_path, rows):
    seconds = np.sort(np.random.default_rng(rows).integers(-500, 500, rows))
    part = 2 * STRIDE
    files = save_moments(tmp_path, "train", (seconds[at : at + part] for at in range(0, rows, part)))
    saved = np.load(tmp_path / next(iter(files)))
    moments = Moments(seconds=saved, examples=rows)
    assert (moments.first, moments.last) == (seconds[0], seconds[-1])
    assert len(saved) == math.ceil(rows / STRIDE) + 1
    for moment_asked in range(-510, 511, 7):
        before = int(np.searchsorted(seconds, moment_asked))
        assert before <= moments.examples_before(moment_asked) <= min(before + STRIDE - 1, rows)


def test_a_split_without_examples_has_no_moments(tmp_path):
    assert save_moments(tmp_path, "test", iter(())) == {}


@pytest.mark.parametrize("options", [(), ("--split-by", "random")])
def test_a_dataset_knows_when_its_examples_were(tmp_path, options):
    data = prepare(tmp_path, "data", "--block-size", "256", "--shard-examples", "1024", *options)
    schema, moments = Schema.load(data), moments_of_log()
    loaded = {split: Moments.load(data, schema, split) for split in schema.splits}
    assert {split: m.examples for split, m in loaded.items()} == {n: s.examples for n, s in schema.splits.items()}
    if options:
        assert all(np.isin(m.seconds, moments).all() for m in loaded.values())
    else:
        end = schema.splits["train"].examples
        assert loaded["train"].seconds.tolist() == [*moments[:end:STRIDE], moments[end - 1]]
        assert loaded["valid"].first == moments[end]
        assert loaded["test"].last == moments[-1]


@pytest.mark.parametrize("form", ["seconds", "integer"])
def test_units_of_times(tmp_path, form):
    data = prepare(tmp_path, "data", form=form)
    if form == "seconds":
        assert Moments.load(data, Schema.load(data), "train").first == moments_of_log()[0]
    else:
        with pytest.raises(DatasetError, match=r"does not say when its train examples were.*no plain integer"):
            Moments.load(data, Schema.load(data), "train")


def test_damaged_moments_are_refused(tmp_path):
    data = prepare(tmp_path, "data")
    schema, path = Schema.load(data), data / "times" / "train.npy"
    seconds = np.load(path)
    for wrong in (seconds[:-1], seconds.astype(np.int32), seconds[::-1]):
        np.save(path, wrong)
        with pytest.raises(DatasetError, match="damaged"):
            Moments.load(data, schema, "train")
        unsealed = dataclasses.replace(schema, files={**schema.files, "times/train.npy": sha256_of(path)})
        with pytest.raises(DatasetError, match="is not of 3,200 examples in order of time"):
            Moments.load(data, unsealed, "train")


def test_windows_begin_at_multiples_of_the_duration(folder):
    config, schema = config_of(folder), Schema.load(folder / "data")
    windows, moments = windows_of(config, schema, 50), moments_of_log()[:3_200]
    midnights = range(moments[0] // DAY * DAY + DAY, moments[-1] + 1, DAY)
    assert [window.since for window in windows] == list(midnights)
    for window, midnight in zip(windows, midnights, strict=True):
        assert window.start == 64 * window.step
        # Up to a batch early, and a stride late.
        assert moments[window.start] < midnight + DAY
        assert np.searchsorted(moments, midnight) - 64 < window.start < np.searchsorted(moments, midnight) + STRIDE
    assert [window.stop for window in windows] == [*(window.start for window in windows[1:]), 3_200]
    # A shorter run has the first of them, so that a longer one goes on with the others.
    assert windows_of(config, schema, windows[2].step) == windows[:3]
    assert windows_of(config_of(folder, "evaluate.progressive="), schema, 50) == ()


def test_windows_of_no_batch_join_the_one_before(folder):
    windows = windows_of(config_of(folder, "evaluate.progressive=1h"), Schema.load(folder / "data"), 50)
    steps = [window.step for window in windows]
    assert steps == sorted(set(steps))
    assert len(steps) > 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["evaluate.progressive=1s"], r"has 5\d\d,\d\d\d windows, each an evaluation"),
        (["evaluate.progressive=30d"], r"50 steps on .*, from 2024-05-01 06:\d\d:\d\d to .*, are not two windows"),
    ],
)
def test_durations_that_make_no_windows(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        windows_of(config_of(folder, *changes), Schema.load(folder / "data"), 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["evaluate.progressive=7"], "'7'; give days, hours, minutes or seconds"),
        (["data.order=shuffled"], "data.order is 'shuffled' and epochs 1; set data.order = 'time'"),
        (["epochs=2"], "epochs 2"),
        (["schedule=fae", "evaluate.progressive="], "schedule 'fae' has an order of its own"),
    ],
)
def test_configurations_that_are_refused(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(folder, *changes)


def test_a_dataset_without_times_is_refused_before_training(tmp_path):
    prepare(tmp_path, "data", form="integer")
    (tmp_path / "run.toml").write_text(CONFIG)
    assert "does not say when its train examples were" in train(tmp_path, "run", code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "1970-01-01"), (DAY + 3_660, "1970-01-02 01:01"), (-1, "1969-12-31 23:59:59")]
)
def test_moments_for_people(seconds, text):
    assert moment(seconds) == text


def test_dispatches_end_where_a_window_is_due():
    schedule = Schedule(total=40, log=8, windows=(3, 21))
    ends, step = [], 0
    while step < 40:
        step += schedule.dispatch(step, 8)
        ends.append(step)
    assert {3, 21, 40} <= set(ends)
    assert [step for step in range(41) if schedule.at(step).window] == [3, 21]
    assert all(schedule.at(step).any for step in (3, 21))


def test_a_window_is_scored_by_the_model_that_has_not_seen_it(folder, run):
    """What the run says of a window is what a run that ends before it says, of the same examples."""
    windows = windows_of(config_of(folder), Schema.load(folder / "data"), 50)
    records = progressive_records(run[0])
    assert [record["since"] for record in records] == [moment(window.since) for window in windows]
    assert [record["step"] for record in records] == [window.step for window in windows]
    window = windows[2]
    train(folder, "short", f"max_steps={window.step}")
    short = restore_run(folder / "short")
    short.run.calibrate(1.0, 0.0)
    with TrainingProgress("off", total=0, start=0) as progress:
        scores = score_split(short.reading, "train", start=window.start, stop=window.stop, progress=progress)
    assert scores.labels.size == window.stop - window.start
    expected = evaluate(scores).to_dict()
    assert {key: records[2][key] for key in expected} == expected
    assert progressive_records(folder / "short") == records[:3]


def test_tastes_that_turn_round_are_seen_in_the_window_where_they_do(run):
    auc = [record["auc"] for record in progressive_records(run[0])]
    assert auc[0] > 0.7
    assert auc[1] < 0.4
    assert auc[-1] > 0.7


def test_a_run_that_goes_on_has_the_same_records(folder, run):
    windows = windows_of(config_of(folder), Schema.load(folder / "data"), 50)
    for number, steps in enumerate((windows[1].step, windows[1].step + 2)):
        name = f"parts{number}"
        train(folder, name, f"max_steps={steps}")
        train(folder, name, "--resume")
        assert progressive_records(folder / name) == progressive_records(run[0])


def test_calibration_takes_the_latest_examples(run):
    """A shift that keeps the mean of all of training would miss the click rate of valid and test."""
    content = json.loads((run[0] / "report" / "metrics.json").read_text())
    assert abs(content["splits"]["valid"]["calibration"] - 1) < 0.12


def test_the_report_shows_windows(run):
    path, printed = run
    content = json.loads((path / "report" / "metrics.json").read_text())
    windows, means = content["progressive"]["windows"], content["progressive"]["means"]
    counts = np.array([window["examples"] for window in windows])
    expected = np.average([window["log_loss"] for window in windows], weights=counts)
    np.testing.assert_allclose(means["log_loss"], expected, rtol=1e-12)
    assert "since" not in means
    page = (path / "report" / "report.html").read_text()
    assert "Order of time" in page
    assert "Click rate and mean prediction by window" in page
    assert "2024-05-03" in page
    assert f"progressive validation, mean of {len(windows)} windows since 2024-05-02" in printed
    assert f"AUC {means['auc']:.4f}" in printed


def drifting(rates, predictions, examples=10_000):
    return {
        "progressive": {
            "windows": [
                {"since": f"day {at}", "examples": examples, "base_rate": rate, "mean_prediction": prediction}
                for at, (rate, prediction) in enumerate(zip(rates, predictions, strict=True))
            ]
        }
    }


def test_drift_is_said_where_many_windows_are_off():
    said = progressive.drift(drifting([0.2, 0.2, 0.3, 0.1, 0.2], [0.2, 0.25, 0.2, 0.2, 0.2]))
    assert "in 3 of 5 windows" in said
    assert "since day 3: mean prediction 0.2000, click rate 0.1000" in said


@pytest.mark.parametrize(
    "content",
    [
        {},
        drifting([0.2, 0.2, 0.3], [0.2, 0.2, 0.2]),  # one of three is not more than a third
        drifting([0.2, 0.3, 0.1], [0.2, 0.2, 0.2], examples=20),  # chance
        {"progressive": {"windows": [{"since": "day 0", "examples": 5, "hr@10": 0.5}]}},
    ],
)
def test_drift_is_not_said(content):
    assert progressive.drift(content) == ""


def prepare_items(folder):
    """A dataset of histories whose moments are known, and a configuration for it."""
    write_log_of_items(folder / "log.csv")
    (folder / "log.toml").write_text(ITEMS_SCHEMA.replace('"at"', '"at"\nformat = "seconds"'))
    given = ["--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv"), "--out", str(folder / "d")]
    assert cli.main(["prepare", "csv", *given, "--no-labels", "--quiet"]) == 0
    (folder / "run.toml").write_text(ITEMS_CONFIG.format(data=folder / "d", kind="sasrec"))


def test_models_that_rank_have_windows_too(tmp_path):
    prepare_items(tmp_path)
    order = ["epochs=1", "data.order=time", "evaluate.progressive=5m", "evaluate.baselines=off"]
    assert cli.main(["train", str(tmp_path / "run.toml"), f"out={tmp_path / 'run'}", *order]) == 0
    content = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())
    windows = content["progressive"]["windows"]
    assert len(windows) >= 2
    assert all(0 <= window["hr@10"] <= 1 for window in windows)
    assert content["progressive"]["means"]["ndcg@10"] > 0
    assert "HR@10" in (tmp_path / "run" / "report" / "report.html").read_text()
