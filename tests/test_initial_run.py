"""Training goes on with another run's model on a later log of the same rows, as if both logs had been one."""

import json

import numpy as np
import pytest
from checkpoint_state import final_arrays
from prepared_logs import prepared
from small_run import CONFIG

from jrec import cli
from jrec.app.config import LRScheduleConfig, load_config
from jrec.app.loop import train
from jrec.errors import CheckpointError, ConfigError

HEADER, ROWS = "label,a,b\n", 1024
LINES = [f"{i * i % 7 % 2},{'uvwxyz'[i * i % 6]},{i * 31 % 50}\n" for i in range(ROWS)]
OPTIMIZER = '[optimizer]\nname = "adam"\n[optimizer.embedding]\nname = "adam"\n[evaluate]\nfinal_splits = []\n'


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A log, and its parts on its rows; the second part again as a log of its own."""
    folder = tmp_path_factory.mktemp("logs")
    whole = {"split": (1, 0, 0), "block_size": 64, "shard_examples": 128}
    prepared_log(folder, LINES, "whole", **whole)
    for name, part in (("monday", LINES[:512]), ("tuesday", LINES[512:])):
        (folder / f"{name}.csv").write_text(HEADER + "".join(part))
        log = ["--schema", folder / "columns.toml", "--input", folder / f"{name}.csv", "--split", "1,0,0"]
        later = [*log, "--vocabulary-from", folder / "whole", "--out", folder / name, "--quiet"]
        assert cli.main(["prepare", "csv", *map(str, later)]) == 0
    prepared_log(folder, LINES[512:], "apart", **whole)
    (folder / "tiny.toml").write_text(CONFIG.replace("bottom_mlp = [4]", "bottom_mlp = []") + OPTIMIZER)
    return folder


def prepared_log(folder, lines, name, **options):
    prepared(folder, HEADER + "".join(lines), name, **options)


def configured_run(logs, tmp_path, data, run, *overrides):
    keys = [f"data.path={str(logs / data)!r}", f"out={str(tmp_path / run)!r}", "data.window_blocks=0", *overrides]
    return load_config(logs / "tiny.toml", keys)


def arrays(folder):
    """The bits of a run's model, rows and slots."""
    _, found, _ = final_arrays(folder)
    return {name: bits for name, bits in found.items() if not name.startswith("progress.")}


KINDS = {"device": (), "host": ("tables.tier=host",), "mesh": ("mesh.devices=2",)}


@pytest.mark.parametrize("kind", ["device", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("host", "mesh"))])
def test_a_run_that_begins_from_another_is_one_long_run(logs, tmp_path, kind):
    """16 steps on one log, or 8 on each of its parts, the second half of which is resumed; and a third run."""
    more = KINDS[kind]

    def configured(*arguments):
        return configured_run(*arguments, *more)

    whole = train(configured(logs, tmp_path, "whole", "whole"))
    assert whole.step == 16
    train(configured(logs, tmp_path, "monday", "monday"))
    begins = f"init_from={str(tmp_path / 'monday')!r}"
    assert train(configured(logs, tmp_path, "tuesday", "tuesday", begins, "max_steps=3")).step == 3
    train(configured(logs, tmp_path, "monday", "monday", "epochs=2"), resume=True)  # does not change where it began
    assert train(configured(logs, tmp_path, "tuesday", "tuesday", begins), resume=True).step == 8
    assert arrays(tmp_path / "tuesday") == arrays(tmp_path / "whole")
    assert arrays(tmp_path / "tuesday") != arrays(tmp_path / "monday")
    at = f"init_from={str(tmp_path / 'tuesday' / 'checkpoints' / '8')!r}"
    train(configured(logs, tmp_path, "monday", "third", at, "max_steps=1"))
    train(configured(logs, tmp_path, "whole", "again", f"init_from={str(tmp_path / 'whole')!r}", "max_steps=1"))
    assert arrays(tmp_path / "third") == arrays(tmp_path / "again")


def test_runs_plans_and_profiles_fit_the_later_log(logs, tmp_path, capsys):
    train(configured_run(logs, tmp_path, "monday", "monday", "max_steps=2"))
    assert cli.main(["access", str(logs / "monday"), "--out", str(tmp_path / "profile"), "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "monday"), str(logs / "tuesday"), "--split", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 512
    assert cli.main(["eval", str(tmp_path / "monday"), str(logs / "apart"), "--split", "train"]) == 2
    assert "or a log that was prepared with --vocabulary-from that dataset" in capsys.readouterr().err
    hardware = ("--hardware", "dgx-a100", "--devices", "2", "--dim", "4", "--figure", "none")
    for profile in ((), ("--profile", str(tmp_path / "profile"))):
        plan = str(tmp_path / "plan")
        assert cli.main(["plan", str(logs / "tuesday"), *hardware, *profile, "--out", plan]) == 0
    assert cli.main(["replan", plan, str(tmp_path / "profile")]) == 0


def test_a_run_is_not_overwritten_by_one_that_begins_from_it(logs, tmp_path):
    train(configured_run(logs, tmp_path, "monday", "monday", "max_steps=1"))
    before = arrays(tmp_path / "monday")
    for place in (tmp_path / "monday", tmp_path / "." / "monday" / "checkpoints" / "1"):
        config = configured_run(logs, tmp_path, "tuesday", "monday", f"init_from={str(place)!r}", "max_steps=1")
        with pytest.raises(ConfigError, match=r"--overwrite would delete the run in .*monday, from which this one"):
            train(config, overwrite=True)
    assert arrays(tmp_path / "monday") == before
    train(configured_run(logs, tmp_path, "monday", "other", "max_steps=1"))
    begins = f"init_from={str(tmp_path / 'monday')!r}"
    train(configured_run(logs, tmp_path, "tuesday", "other", begins, "max_steps=1"), overwrite=True)


def test_a_schedule_counts_the_runs_own_steps(logs, tmp_path):
    schedule = LRScheduleConfig(kind="warmup_cosine", warmup_steps=3)
    fresh, later = schedule.build(20), schedule.build(20, first_step=700)
    np.testing.assert_array_equal([fresh(step) for step in range(20)], [later(700 + step) for step in range(20)])
    train(configured_run(logs, tmp_path, "monday", "monday"))
    begins = (
        f"init_from={str(tmp_path / 'monday')!r}",
        "lr_schedule.kind='warmup_cosine'",
        "lr_schedule.warmup_steps=2",
    )
    train(configured_run(logs, tmp_path, "tuesday", "tuesday", *begins))
    # A schedule that had counted Monday's steps would be at its end, with a factor of 0.
    for name, bits in arrays(tmp_path / "tuesday").items():
        if name.endswith("/values"):
            assert bits != arrays(tmp_path / "monday")[name]


def test_what_does_not_fit_is_refused(logs, tmp_path, capsys):
    train(configured_run(logs, tmp_path, "monday", "monday", "max_steps=1"))
    begins = f"init_from={str(tmp_path / 'monday')!r}"
    with pytest.raises(
        ConfigError, match=r"init_from: the run in .*monday is of dataset .* prepare the log with --vocab"
    ):
        train(configured_run(logs, tmp_path, "apart", "apart", begins))
    with pytest.raises(CheckpointError, match="is a checkpoint of another model: model"):
        train(configured_run(logs, tmp_path, "tuesday", "wide", begins, "model.embedding_dim=8"))
    with pytest.raises(CheckpointError, match="is neither a run folder"):
        train(configured_run(logs, tmp_path, "tuesday", "none", f"init_from={str(tmp_path / 'absent')!r}"))
    with pytest.raises(ConfigError, match=r"on other examples of the same rows \(init_from=.*monday\)"):
        train(configured_run(logs, tmp_path, "tuesday", "monday", "max_steps=1"), resume=True)
    arguments = ["train", logs / "tiny.toml", f"data.path={logs / 'apart'}", f"out={tmp_path / 'command'}", begins]
    assert cli.main([str(argument) for argument in arguments]) == 2
    assert "prepare the log with --vocabulary-from" in capsys.readouterr().err
    assert not (tmp_path / "command").exists()
