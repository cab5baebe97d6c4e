"""``jrec fae``: what its actions print, write and refuse."""

import numpy as np
import pytest

from benchmarks.studies.fae import figures
from jrec.access.calibrate import Calibration
from jrec.access.calibrate.sample import Estimate, RandEmBox
from jrec.cli import main
from jrec.data.fae import FaeManifest

CALIBRATE = ["--budget", "60kB", "--dim", "4", "--slot-bytes", "0", "--small", "8kB"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "data"
    command = ["synth", "--like", "quickstart", "--rows", "20000", "--table-rows", "5000", "--block-size", "256"]
    assert main([*command, "--out", str(folder), "--quiet", "--threads", "1"]) == 0
    return str(folder)


@pytest.mark.parametrize("sample", [[], ["--sample", "0.4"]], ids=["exact", "sample"])
def test_calibrate_pack_and_check(data, tmp_path, capsys, sample):
    file, out = (str(tmp_path / name) for name in ("c.json", "fae"))
    capsys.readouterr()
    assert main(["fae", "calibrate", data, *CALIBRATE, *sample, "--out", file, "--quiet"]) == 0
    said = capsys.readouterr().out
    found = Calibration.load(file)
    assert f"{found.threshold:.3g} of the inputs" in said
    assert "the budget is 60 kB" in said
    assert ("drawn with seed 0" in said) == bool(sample)
    assert f"{sum(t.hot for t in found.tables):,} of {sum(t.rows for t in found.tables):,} rows are hot" in said
    assert "hot inputs: " in said
    assert found.row_bytes == 16
    assert 0.5 * 60_000 < found.hot_bytes <= 60_000

    assert main(["fae", "pack", data, "--calibration", file, "--out", out, "--quiet"]) == 0
    said = capsys.readouterr().out
    packed = FaeManifest.load(out)
    assert f"{packed.hot_examples:,} hot examples" in said
    assert packed.hot_examples + packed.cold_examples == 16_000
    share = packed.hot_examples / 16_000
    assert share == pytest.approx(found.hot_inputs.share, abs=0.05)
    for name, rows in found.rows.items():
        np.testing.assert_array_equal(packed.hot_rows[name], rows)
    assert packed.calibration["hot_bytes"] == found.hot_bytes

    assert main(["fae", "check", out]) == 0
    assert "whole" in capsys.readouterr().out
    shard = next((tmp_path / "fae" / "hot").glob("train-*"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    assert main(["fae", "check", out]) == 2
    assert f"hot/{shard.name} is not the shard that the schema names" in capsys.readouterr().err


def test_one_block_does_not_tell_the_error_of_the_share_of_hot_inputs(tmp_path, capsys):
    """A dataset of up to ten blocks: 5 % of them are one, over which nothing spreads."""
    few = ["synth", "--like", "quickstart", "--rows", "2000", "--table-rows", "500", "--out", str(tmp_path / "few")]
    assert main([*few, "--quiet", "--threads", "1"]) == 0
    capsys.readouterr()
    assert main(["fae", "calibrate", str(tmp_path / "few"), *CALIBRATE, "--out", str(tmp_path / "c"), "--quiet"]) == 0
    assert "(standard error not known from one block, on 1,600 inputs)" in capsys.readouterr().out
    assert Calibration.load(tmp_path / "c").hot_inputs.error is None


def test_pack_calibrates_by_itself_and_takes_a_runs_settings(data, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\npath = "x"\n[model]\nembedding_dim = 8\nbottom_mlp = [8]\ntop_mlp = [1]\n'
        '[optimizer.embedding]\nname = "adagrad"\nlearning_rate = 0.1\n'
    )
    out = tmp_path / "fae"
    arguments = ["fae", "pack", data, "--budget", "200kB", "--small", "8kB", "--config", str(config)]
    assert main([*arguments, "--out", str(out), "--shuffle-seed", "3", "--threads", "2", "--quiet"]) == 0
    packed = FaeManifest.load(out)
    assert packed.calibration["row_bytes"] == 8 * 4 + 8 * 4
    assert packed.calibration["options"]["sample"] is None
    assert packed.seed == 3
    assert packed.calibration["hot_bytes"] <= 200_000
    hot = packed.hot_schema
    assert hot is not None
    assert sum(map(len, packed.hot_rows.values())) * 64 == packed.calibration["hot_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "--budget", "1kB"], "more than the budget"),
        (
            ["pack", "--out", "OUT", "--calibration", "c.json", "--sample", "1", "--dim", "3"],
            "--sample, --dim would make",
        ),
        (["pack", "--out", "OUT", "--calibration", "absent.json"], "absent.json cannot be read (No such file"),
    ],
)
def test_mistakes_are_explained(data, tmp_path, capsys, arguments, message):
    arguments = [str(tmp_path / "out") if a == "OUT" else a for a in arguments]
    assert main(["fae", arguments[0], data, *arguments[1:], "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bound_that_does_not_hold_is_said(data, capsys, monkeypatch):
    monkeypatch.setattr(RandEmBox, "estimate", lambda self, cutoff: Estimate(rows=0, bound=0, method="t"))
    assert main(["fae", "calibrate", data, *CALIBRATE, "--sample", "0.4", "--quiet"]) == 0
    assert "a bound of the Rand-Em Box did not hold" in capsys.readouterr().out


def test_the_study_draws_figures_and_the_estimates(data, tmp_path, capsys, monkeypatch):
    arguments = ["figures", data, "--budget", "1MB", "--sample", "0.4", "--out", str(tmp_path / "figures")]
    monkeypatch.setattr("sys.argv", arguments)
    figures.main()
    assert "estimate" in capsys.readouterr().out
    drawn = {path.name: path.read_bytes()[:4] for path in (tmp_path / "figures").iterdir()}
    assert drawn == dict.fromkeys(figures.FILES, b"\x89PNG")


def test_help_has_examples(capsys):
    for action in ([], ["calibrate"], ["pack"]):
        with pytest.raises(SystemExit):
            main(["fae", *action, "--help"])
        assert f"examples:\n  jrec fae {(action or ['calibrate'])[0]} data/kaggle" in capsys.readouterr().out
