"""Runs on datasets whose tables grow: the same bits when resumed, evaluated, predicted, exported, gone on with."""

import json
import shutil
import socket
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import shop_logs
from child_processes import with_devices

import jrec
from jrec import cli, serving
from jrec.access import AccessProfile
from jrec.access.profile import TableProfile
from jrec.app.config import load_config
from jrec.app.evaluate import restore_run
from jrec.app.export import export_run
from jrec.app.loop import train
from jrec.data.schema import DatasetError, Schema
from jrec.data.unknown import UnknownValuesWarning
from jrec.errors import ConfigError
from jrec.sharding import load_plan

SMALL = ("tables.growth.capacity=30", "tables.overrides.user.admit_after=2", "tables.overrides.user.evict='lru'")
OFTEN = ("checkpoint.every_steps=4", "checkpoint.keep=20", "epochs=2")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Monday's dataset with growing tables, and Tuesday's log and dataset."""
    folder = tmp_path_factory.mktemp("shop")
    lines = {}
    for day, (name, rows) in enumerate((("monday", 1200), ("tuesday", 300))):
        lines[name] = shop_logs.write_log(folder / f"{name}.csv", rows, seed=day)
        shop_logs.prepare(folder, folder / f"{name}.csv", name, "--growing", "user,item")
    return folder, folder / "monday", folder / "tuesday", lines["tuesday"]


def arrays(run):
    """All arrays of a run's last checkpoint: dense, vocabularies, rows and slots."""
    step = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    saved = restore_run(run / "checkpoints" / str(step), slots=True).saved
    found = dict(saved.arrays())
    for table in ("user", "item"):
        record = saved.table(table).record.shape
        for name in ("values", *record.slots):
            found[f"{table}/{name}"] = saved.table(table).read(name, np.arange(record.rows))
    return found


def equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def close(found, want):
    """Vocabularies are equal; rows, slots and parameters up to the order of sums."""
    assert found.keys() == want.keys()
    for name, array in want.items():
        if name.startswith("progress.growing."):
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        elif not name.startswith("progress."):
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_dataset_holds_keys(shop):
    folder, monday, tuesday, _ = shop
    schema, later = Schema.load(monday), Schema.load(tuesday)
    assert schema.growing == {"user", "item"}
    assert schema.table("user").rows == 40  # values of training
    assert not (monday / "vocabulary").exists() or not list((monday / "vocabulary").iterdir())
    assert schema.identity.rows == later.identity.rows  # without --vocabulary-from
    assert schema.identity.rows != Schema.load(shop_logs.prepare(folder, folder / "monday.csv", "fixed")).identity.rows


@pytest.mark.parametrize("place", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_a_run_resumed_anywhere_has_the_same_bits(place, shop, tmp_path):
    _, monday, _, _ = shop
    more = (*SMALL, *OFTEN, *(("tables.tier='host'",) if place == "host" else ()))
    whole = shop_logs.trained(tmp_path, monday, *more, out="whole")
    want = arrays(whole)
    evicted = want["progress.growing.user.numbers"][5]
    assert evicted > 0
    for step in (8, 12):
        again = tmp_path / f"from-{step}"
        shutil.copytree(whole, again)
        config = load_config(tmp_path / "shop_run.toml", [f"data.path={str(monday)!r}", f"out={str(again)!r}", *more])
        train(config, resume=True, resume_from=step)
        equal(arrays(again), want)


@pytest.mark.slow
def test_devices_of_any_number_go_on(shop, tmp_path):
    _, monday, _, _ = shop
    whole = shop_logs.trained(tmp_path, monday, *SMALL, *OFTEN, out="whole")
    want, again = arrays(whole), tmp_path / "four"
    shutil.copytree(whole, again)
    given = [f"data.path={str(monday)!r}", f"out={str(again)!r}", *SMALL, *OFTEN, "mesh.devices=4"]
    train(load_config(tmp_path / "shop_run.toml", given), resume=True, resume_from=12)
    close(arrays(again), want)


@pytest.mark.slow
def test_processes_of_any_number_go_on(shop, tmp_path):
    """Two processes train to the end; one goes on from the middle of it, with the batches that both had."""
    _, monday, _, _ = shop
    (tmp_path / "two.toml").write_text(shop_logs.CONFIG)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    keys = [f"data.path={monday}", *SMALL, *OFTEN, "mesh.devices=4", "evaluate.baselines=off"]
    command = [sys.executable, "-m", "jrec", "train", tmp_path / "two.toml", *keys, f"out={tmp_path / 'two'}"]
    together = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process"]
    options = {"env": with_devices(2), "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    children = [subprocess.Popen([*map(str, command), *together, str(n)], **options) for n in range(2)]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors[-2000:]
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    given = [f"data.path={str(monday)!r}", f"out={str(tmp_path / 'one')!r}", *keys[1:]]
    train(load_config(tmp_path / "two.toml", given), resume=True, resume_from=12)
    close(arrays(tmp_path / "one"), arrays(tmp_path / "two"))


def test_a_trained_model_is_used_as_any_other(shop, tmp_path):
    folder, monday, tuesday, lines = shop
    run = shop_logs.trained(tmp_path, monday, *SMALL)
    scores = restore_run(run, tuesday)
    want = np.concatenate([scores.scores(split).logits for split in ("train", "valid", "test")])
    for source in (tuesday, folder / "tuesday.csv"):
        out = tmp_path / "scores.parquet"
        assert cli.main(["predict", str(run), str(source), "--out", str(out), "--overwrite", "--quiet"]) == 0
        np.testing.assert_allclose(pq.read_table(out)["logit"], want, rtol=1e-5, atol=1e-6)  # in other batches
    columns = {name: [line[name] for line in lines] for name in lines[0] if name != "click"}
    with pytest.warns(UnknownValuesWarning, match="of the values of 'user' training did not see"):
        logits = jrec.load_run(run).logits(columns)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
    export_run(run, tmp_path / "export")
    np.testing.assert_allclose(serving.load(tmp_path / "export").logits(columns), want, rtol=2e-5, atol=2e-6)


def test_going_on_with_a_later_log_is_one_run_and_its_export_a_delta(shop, tmp_path):
    _, monday, tuesday, lines = shop
    run = shop_logs.trained(tmp_path, monday, *SMALL)
    export_run(run, tmp_path / "export")
    begins = f"init_from={str(run)!r}"
    later = shop_logs.trained(tmp_path, tuesday, *SMALL, begins, out="later")
    before, after = arrays(run), arrays(later)
    clock, _, _, admitted, *_ = after["progress.growing.user.numbers"][1:]
    assert clock == before["progress.growing.user.numbers"][1] + restore_run(later).saved.step
    assert admitted > before["progress.growing.user.numbers"][4]
    export_run(later, tmp_path / "delta", since=[tmp_path / "export"])
    export_run(later, tmp_path / "whole")
    columns = {name: [line[name] for line in lines] for name in lines[0] if name != "click"}
    model, whole = serving.load(tmp_path / "export"), serving.load(tmp_path / "whole")
    old = model.logits(columns)
    model.apply(tmp_path / "delta")
    np.testing.assert_array_equal(model.logits(columns), whole.logits(columns))
    assert np.abs(model.logits(columns) - old).max() > 1e-4


def test_capacities_are_settled_by_the_first_dataset(shop, tmp_path):
    """Tuesday has fewer values than Monday: run, evaluation and the next run keep Monday's capacities all the same."""
    _, monday, tuesday, _ = shop
    run = shop_logs.trained(tmp_path, monday, "max_steps=2")
    rows = {name: Schema.load(day).table("item").rows for name, day in (("monday", monday), ("tuesday", tuesday))}
    assert rows["monday"] != rows["tuesday"]
    assert restore_run(run, tuesday).saved.table("item").record.shape.rows == rows["monday"] + 1
    later = shop_logs.trained(tmp_path, tuesday, "max_steps=2", f"init_from={str(run)!r}", out="later")
    assert restore_run(later).saved.table("item").record.shape.rows == rows["monday"] + 1
    shop_logs.trained(tmp_path, monday, "max_steps=4", resume=True)  # with capacities left open again


def test_the_report_says_what_grew(shop, tmp_path, capsys):
    _, monday, _, _ = shop
    (tmp_path / "run.toml").write_text(shop_logs.CONFIG)
    assert (
        cli.main(["train", str(tmp_path / "run.toml"), f"data.path={monday}", f"out={tmp_path / 'run'}", *SMALL]) == 0
    )
    content = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())["growing"]
    items = content["item"]
    assert items["keys"] == items["admitted"] - items["evicted"] == 29
    assert content["user"]["oov_share"] == content["user"]["oov_lookups"] / content["user"]["lookups"] > 0
    said = capsys.readouterr().out
    assert "2 table(s) that grow: 58 values have rows" in said
    assert "lookups; give it more by tables.overrides." in said


def planned(*arguments):
    """Runs `jrec plan` on four devices; returns its exit code."""
    return cli.main(["plan", *map(str, arguments), "--hardware", "h200x8", "--devices", "4", "--figure", "none"])


def test_a_plan_places_rows_by_capacity_and_then_by_what_a_run_accessed(shop, tmp_path, capsys):
    """Which value has which row is not known before training: all rows of a table count alike, then as observed."""
    _, monday, tuesday, _ = shop
    plain = shop_logs.trained(tmp_path, monday, *SMALL, *OFTEN, out="plain")
    assert planned(monday, "--config", plain / "config.toml", "--out", tmp_path / "plan") == 0
    plan = load_plan(tmp_path / "plan", schema=Schema.load(tuesday))  # of other values, by the same keys
    assert {table.name: table.rows for table in plan.tables} == {"user": 30, "item": 30}
    assert "rows of item, user, which grow, all alike" in plan.info["profile"]
    over = (f"plan={str(tmp_path / 'plan')!r}", "mesh.devices=4")
    run = shop_logs.trained(tmp_path, monday, *SMALL, *OFTEN, *over, out="planned")
    close(arrays(run), arrays(plain))
    seen = AccessProfile.load(run / "access")
    for name, ids in (("user", 1.0), ("item", 1.0)):  # and lists of items
        counts = seen.table(name).dense()
        assert len(counts) == 30
        assert counts.sum() / seen.examples >= ids
        assert counts.std() > 0
    capsys.readouterr()
    assert cli.main(["replan", str(tmp_path / "plan"), str(run / "access"), "--out", str(tmp_path / "now")]) == 0
    config = ["--config", plain / "config.toml", "--profile", run / "access"]
    assert planned(monday, *config, "--out", tmp_path / "observed") == 0
    assert "monitored" in load_plan(tmp_path / "observed").info["profile"]
    assert cli.main(["plan", str(monday), "--out", str(tmp_path / "plan"), "--explain", "user:3"]) == 0


def test_a_plan_without_a_configuration_has_room_for_all_values_and_fits_no_other_capacity(shop, tmp_path, capsys):
    _, monday, _, _ = shop
    assert planned(monday, "--dim", "8", "--out", tmp_path / "plan") == 0
    rows = {t.name: t.rows_for_all for t in Schema.load(monday).tables}
    assert {t.name: t.rows for t in load_plan(tmp_path / "plan").tables} == rows
    over = (f"plan={str(tmp_path / 'plan')!r}", "mesh.devices=4", "max_steps=1")
    shop_logs.trained(tmp_path, monday, *over, out="all")
    with pytest.raises(ConfigError, match=r"places 41 rows of table 'user', but .*capacity.* has 30; plan again with"):
        shop_logs.trained(tmp_path, monday, *over, *SMALL, out="refused")
    capsys.readouterr()
    assert planned(monday, "--dim", "8", "--tt", "user=2", "--out", tmp_path / "cores") == 2
    assert "--tt user: the table grows" in capsys.readouterr().err
    seen = uniform_profile({"user": 30, "item": 30}, source="elsewhere")
    seen.save(tmp_path / "other.access")
    config = ["--dim", "8", "--profile", tmp_path / "other.access"]
    assert planned(monday, *config, "--out", tmp_path / "cores") == 2
    assert "profile has 30 rows of table 'user', which grows, but its capacity is 41" in capsys.readouterr().err


def uniform_profile(rows, source):
    tables = [TableProfile(name=name, starts=[0, count], counts=[1.0]) for name, count in rows.items()]
    return AccessProfile(tables=tuple(tables), examples=10, source=source)


def test_a_plan_of_cores_makes_no_tensor_train_of_a_table_that_grows(shop, tmp_path):
    folder, monday, _, _ = shop
    fixed = shop_logs.prepare(folder, folder / "monday.csv", "fixed_for_cores")
    assert planned(fixed, "--dim", "8", "--tt", "user=2!", "--out", tmp_path / "cores") == 0
    over = (f"plan={str(tmp_path / 'cores')!r}", "mesh.devices=4", "max_steps=1")
    with pytest.raises(ConfigError, match=r"has rows of table 'user' in cores, but the table grows"):
        shop_logs.trained(tmp_path, monday, *over, out="refused")


def test_what_needs_known_rows_is_refused_in_one_line(shop, tmp_path, capsys):
    folder, monday, _, _ = shop
    for arguments, needs, remedy in (
        (["reorder", monday, "--always", "--min-rows", "1"], "`jrec reorder` renumbers rows", "without --growing"),
        (["access", monday], "`jrec access` counts the accesses of rows", "counts them itself, in RUN/access"),
        (["access", monday, "--sample", "0.5"], "`jrec access` counts the accesses of rows", "in RUN/access"),
        (
            ["fae", "calibrate", monday, "--budget", "1MB", "--out", tmp_path / "fae"],
            "`jrec fae calibrate` chooses rows by their counts", "without --growing",
        ),
    ):  # fmt: skip
        capsys.readouterr()
        assert cli.main([*map(str, arguments)]) == 2
        error = capsys.readouterr().err.strip()
        assert needs in error, error
        assert f"but table 'item' of {monday} grows: training gives its rows to values as they come" in error, error
        assert error.endswith(remedy)
    for overrides, message in (
        (("tables.overrides.item.tier='tt'",), "the table grows, so that its rows change hands"),
        (("optimizer.embedding.tables.item.frozen=true",), "'item' grows, but is frozen"),
    ):
        with pytest.raises(ConfigError, match=message):
            shop_logs.trained(tmp_path, monday, *overrides, out="refused")
    fixed = shop_logs.prepare(tmp_path, folder / "monday.csv", "fixed")
    with pytest.raises(ConfigError, match="does not grow; prepare the log with --growing item"):
        shop_logs.trained(tmp_path, fixed, "tables.overrides.item.capacity=9", out="refused")
    with pytest.raises(DatasetError, match="load_vocabularies reads which value has which row, but"):
        jrec.data.load_vocabularies(monday)
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="user", rows=9, dim=4)], [jrec.FeatureConfig(name="user", table="user")]
    )
    with pytest.raises(DatasetError, match=r"'user' of 'shop' grows: the dataset holds keys.*of_keys"):
        jrec.data.make_loader(monday, None, layout, "train", jrec.data.LoaderConfig(batch_size=8))
