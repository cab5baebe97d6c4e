"""``jrec fae``: what its actions print, write and refuse."""

import numpy as np
import pytest

from jrec.access.calibrate.figures import FILES
from jrec.access.calibrate.file import Calibration
from jrec.cli import main
from jrec.data.fae import FaeManifest

CALIBRATE = ["--budget", "60kB", "--dim", "4", "--slot-bytes", "0", "--small", "8kB", "--sample", "0.4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "data"
    command = ["synth", "--like", "quickstart", "--rows", "20000", "--table-rows", "5000", "--block-size", "256"]
    assert main([*command, "--out", str(folder), "--quiet", "--threads", "1"]) == 0
    return str(folder)


def test_calibrate_pack_and_check(data, tmp_path, capsys):
    file, out, figures = (str(tmp_path / name) for name in ("c.json", "fae", "figures"))
    capsys.readouterr()
    assert main(["fae", "calibrate", data, *CALIBRATE, "--out", file, "--figures", figures, "--quiet"]) == 0
    said = capsys.readouterr().out
    found = Calibration.load(file)
    assert f"{found.threshold:.3g} of the inputs" in said
    assert "the budget is 60.0 kB" in said
    assert "hot inputs: " in said
    assert found.row_bytes == 16
    assert found.hot_bytes <= 60_000
    drawn = {path.name: path.read_bytes()[:4] for path in (tmp_path / "figures").iterdir()}
    assert drawn == dict.fromkeys(FILES, b"\x89PNG")

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


def test_pack_calibrates_by_itself_and_takes_a_runs_settings(data, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\npath = "x"\n[model]\nembedding_dim = 8\nbottom_mlp = [8]\ntop_mlp = [1]\n'
        '[optimizer.embedding]\nname = "adagrad"\nlearning_rate = 0.1\n'
    )
    out = tmp_path / "fae"
    arguments = ["fae", "pack", data, "--exact", "--budget", "200kB", "--small", "8kB", "--config", str(config)]
    assert main([*arguments, "--out", str(out), "--shuffle-seed", "3", "--threads", "2", "--quiet"]) == 0
    packed = FaeManifest.load(out)
    assert packed.calibration["row_bytes"] == 8 * 4 + 8 * 4
    assert packed.calibration["options"]["exact"]
    assert packed.seed == 3
    assert packed.calibration["hot_bytes"] <= 200_000
    hot = packed.hot_schema
    assert hot is not None
    assert sum(map(len, packed.hot_rows.values())) * 64 == packed.calibration["hot_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "--budget", "1kB"], "more than the budget"),
        (["pack", "--out", "OUT", "--calibration", "c.json", "--exact", "--dim", "3"], "--exact, --dim would make"),
        (["pack", "--out", "OUT", "--calibration", "absent.json"], "absent.json cannot be read (No such file"),
    ],
)
def test_mistakes_are_explained(data, tmp_path, capsys, arguments, message):
    arguments = [str(tmp_path / "out") if a == "OUT" else a for a in arguments]
    assert main(["fae", arguments[0], data, *arguments[1:], "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_has_examples(capsys):
    for action in ([], ["calibrate"], ["pack"]):
        with pytest.raises(SystemExit):
            main(["fae", *action, "--help"])
        assert f"examples:\n  jrec fae {(action or ['calibrate'])[0]} data/kaggle" in capsys.readouterr().out
