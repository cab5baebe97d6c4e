"""Functions that a training calls: what they are told, and how they end it."""

import json
import pathlib
import re

import numpy as np
import pytest
import shop_logs

from jrec import cli
from jrec.app.config import load_config
from jrec.app.loop import train
from jrec.errors import ConfigError

KEYS = ("epochs=2", "log.every_steps=4", "evaluate.every_steps=6", "checkpoint.every_steps=5")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    shop_logs.write_log(folder / "log.csv", 800)
    return shop_logs.prepare(folder, folder / "log.csv", "data")


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_is_told_what_the_log_says_at_the_steps_that_are_due(dataset, tmp_path):
    events, rows = [], {}

    def watch(event):
        events.append((event.kind, event.step, dict(event.values)))
        if event.kind == "evaluation":
            columns = {"user": [1, 2], "item": [3, 4], "history": [[1], []], "price": [0.5, 1.0]}
            rows[event.step] = event.run.rows("item", [1])[0], columns
            assert event.folder == tmp_path / "run"

    run = shop_logs.trained(tmp_path, dataset, *KEYS, callbacks=[watch])
    assert [step for kind, step, _ in events if kind == "log"] == [4, 8, 12, 16, 20]
    assert [step for kind, step, _ in events if kind == "evaluation"] == [6, 12, 18]
    assert [step for kind, step, _ in events if kind == "checkpoint"] == [5, 10, 15, 20]
    logged = {(one["split"], one["step"]): one for one in records(run)}
    for kind, step, values in events:
        if kind == "log":
            assert values["loss"] == logged["train", step]["loss"]
        if kind == "evaluation":
            assert values["valid/auc"] == logged["valid", step]["auc"]
    first, *later = rows.values()
    assert all(not np.array_equal(row, first[0]) for row, _ in later)


def test_it_may_end_the_run_which_is_then_whole(dataset, tmp_path):
    def stop(event):
        if event.kind == "evaluation" and event.step >= 12:
            event.stop()

    path = tmp_path / "run.toml"
    path.write_text(shop_logs.CONFIG)
    out = tmp_path / "run"
    keys = [f"data.path={str(dataset)!r}", f"out={str(out)!r}", *KEYS]
    outcome = train(load_config(path, keys), callbacks=[stop])
    assert (outcome.step, outcome.finished, outcome.stopped_early) == (12, True, True)
    assert outcome.scores.keys() == {"valid", "test"}
    assert (out / "checkpoints" / "12").is_dir()


def test_what_it_raises_ends_the_run_and_the_run_goes_on_later(dataset, tmp_path):
    class PrunedError(Exception):
        pass

    def prune(event):
        if (event.kind, event.step) == ("log", 12):
            raise PrunedError

    with pytest.raises(PrunedError):
        shop_logs.trained(tmp_path, dataset, *KEYS, callbacks=[prune])
    run = shop_logs.trained(tmp_path, dataset, *KEYS, resume=True)
    whole = shop_logs.trained(tmp_path, dataset, *KEYS, out="whole")
    assert [one["loss"] for one in records(run) if one["split"] == "train"] == [
        one["loss"] for one in records(whole) if one["split"] == "train"
    ]


def test_the_command_calls_functions_by_name(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_hooks.py").write_text(
        "def tell(event):\n    print(event.kind, event.step, *sorted(event.values)[:1])\n"
    )
    (tmp_path / "run.toml").write_text(shop_logs.CONFIG)
    keys = [f"data.path={str(dataset)!r}", "max_steps=4", "log.every_steps=4", "callbacks=['own_hooks:tell']"]
    assert cli.main(["train", "run.toml", *keys]) == 0
    assert "log 4 loss\n" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"callbacks is own_hooks:tel, but own_hooks .* has no tel; did you mean tell\?"
    ):
        train(load_config(tmp_path / "run.toml", [*keys[:-1], "callbacks=['own_hooks:tel']"]))


def test_the_callback_of_the_page_ends_a_run(dataset, tmp_path, capsys):
    page = (pathlib.Path(__file__).parents[1] / "docs" / "training.md").read_text()
    (snippet,) = re.findall(r"```python\n(def watch.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(snippet.replace("> 0.8", "> 0.0"), "docs/training.md", "exec"), names)
    run = shop_logs.trained(tmp_path, dataset, *KEYS, callbacks=[names["watch"]])
    assert capsys.readouterr().out.startswith("6 0.")
    assert (run / "checkpoints" / "6").is_dir()
