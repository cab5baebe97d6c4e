"""``jrec prove``: what has to be equal to the bit is, and what is not is told."""

import json

import numpy as np
import pytest
from run_cases import quickstart

from jrec.app import prove
from jrec.app.config import DataConfig, ModelConfig, TrainConfig
from jrec.app.prove import CLOSE, FIRST, SAME, ProofError, Result, Way
from jrec.cli import main
from jrec.errors import ConfigError

KEYS = ("data.batch_size=64", "model.bottom_mlp=[16]", "model.top_mlp=[8,1]", "data.workers=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=4000)


def config_of(data="data", **options):
    return TrainConfig(data=DataConfig(path=str(data), batch_size=64), **options)


def test_the_ways_of_a_configuration():
    names = [way.name for way in prove.ways(config_of(), [1, 2])]
    assert names == [
        "one device",
        "one device, killed and resumed",
        "rows in host memory",
        "2 devices",
        "2 devices, killed and resumed",
        "2 devices, rows in host memory",
        "2 devices, by a plan",
    ]
    ranking = config_of(model=ModelConfig(kind="sasrec"))
    assert "2 devices, by a plan" not in [way.name for way in prove.ways(ranking, [1, 2])]
    with pytest.raises(ConfigError, match="which 3 devices cannot share"):
        prove.ways(config_of(), [1, 3])
    with pytest.raises(ConfigError, match="trains by 'plain'"):
        prove.ways(config_of(schedule="fae"), [1])


def result_of(way, bits="a", loss_difference=0.0):
    digests = dict.fromkeys(("losses", "rows", "dense"), bits)
    return Result(
        way=way, losses=np.zeros(2), digests=digests, loss_difference=loss_difference, row_difference=0.0, seconds=1.0
    )


def test_verdicts():
    first, same, other = Way(name="one"), Way(name="host", like="one"), Way(name="two")
    found = prove.pairs([result_of(first), result_of(same), result_of(same, "b"), result_of(other, "c", 1e-6)])
    assert [said for _, said in found] == [FIRST, SAME, "not the bits of 'one'", CLOSE]
    ((_, _), (_, said)) = prove.pairs([result_of(first), result_of(other, "c", 0.1)])
    assert said == "another model"
    assert [prove.holds(said) for said in (FIRST, SAME, CLOSE, "another model", "not the bits of 'one'")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_way_that_cannot_be_trained_is_named(data, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config_of(data).to_toml())
    with pytest.raises(ProofError, match=r"one device: .*no_such"):
        next(prove.prove(config_of(data), path, ["model.no_such=1"], tmp_path, steps=2, devices=[1]))


@pytest.mark.slow
def test_the_command_proves_a_configuration_and_tells_another_model(data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "proof.json"
    arguments = ["prove", "quickstart", f"data.path={data}", *KEYS, "--steps", "24", "--devices", "1", "2"]
    assert main([*arguments, "--out", str(out), "--keep", str(tmp_path / "runs")]) == 0
    ways = json.loads(out.read_text())["ways"]
    assert [way["verdict"] for way in ways] == [FIRST, SAME, SAME, CLOSE, SAME, SAME, CLOSE]
    assert ways[3]["digests"]["rows"] != ways[0]["digests"]["rows"]
    assert 0 < ways[3]["row_difference"] < 1e-3
    shown = capsys.readouterr().out
    assert all(way["digests"]["losses"] in shown for way in ways)
    assert shown.endswith("\nall 7 ways came to what they have to\n")
    # Another seed is another model: the command finds it.
    assert main([*arguments, "--keep", str(tmp_path / "runs")]) == 2  # which is there already
    assert "is there already" in capsys.readouterr().err
    two = [Way(name="one device"), Way(name="another seed", keys=("seed=7",), like="one device")]
    monkeypatch.setattr(prove, "ways", lambda config, devices: two)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert "not the bits of 'one device'" in out
    assert "1 of 2 ways did not come to what they have to: another seed" in err
