"""Runs that are resumed with another length: the bits of a run of that length, and learning rates that fit it."""

import json
import shutil

import pytest
from checkpoint_state import final_arrays
from run_cases import CONFIG, configuring, quickstart

from jrec.app.loop import train
from jrec.app.preflight import check_start
from jrec.cli import main
from jrec.errors import ConfigError

DECAYS = ("lr_schedule.kind=warmup_linear", "optimizer.embedding.tables.C7={lr_schedule={kind='warmup_cosine'}}")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


def log_of(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def lengths_of(folder):
    records = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    return [record for record in records if record["split"] == "length"]


def test_a_finished_run_goes_on_as_if_it_had_been_longer(configure, capsys):
    watched = ("checkpoint.keep_best=true", "evaluate.early_stopping.patience=9")
    whole = train(configure("epochs=2", "max_steps=24", *watched, out="whole"))
    train(configure("epochs=1", "max_steps=16", *watched))
    assert "jrec:" not in capsys.readouterr().err
    longer = train(configure("epochs=2", "max_steps=24", *watched), resume=True)  # 19 batches an epoch
    assert final_arrays(longer.folder) == final_arrays(whole.folder)
    assert log_of(longer.folder) == log_of(whole.folder)
    assert longer.scored_step == whole.scored_step
    line = "jrec: from step 16 on this is a run of 24 steps instead of 16; the learning rates do not change\n"
    assert capsys.readouterr().err.endswith(line)
    assert lengths_of(longer.folder) == [{"step": 16, "split": "length", "before": 16, "steps": 24}]


def test_a_decay_over_the_whole_run_is_stretched_from_the_step_of_the_resumption(configure, tmp_path, capsys):
    train(configure(*DECAYS, "max_steps=8", "checkpoint.keep=9"))
    shutil.copytree(tmp_path / "run", tmp_path / "named")
    first = log_of(tmp_path / "run")
    # The same lengths, by schedules that name them.
    named = (*DECAYS, "lr_schedule.decay_steps=16", "optimizer.embedding.tables.C7.lr_schedule.decay_steps=16")
    config = configure(*named, "max_steps=16", out="named")
    (tmp_path / "named" / "config.toml").write_text(config.to_toml())
    train(config, resume_from=5)
    capsys.readouterr()
    longer = train(configure(*DECAYS, "max_steps=16"), resume_from=5).folder
    assert final_arrays(longer) == final_arrays(tmp_path / "named")
    assert log_of(longer) == log_of(tmp_path / "named")
    assert log_of(longer)[0] == first[0]  # step 4
    assert log_of(longer)[-1] != first[-1]
    # Step 6: 1 - 6/8 = 0.25 of the rate before, 1 - 6/16 = 0.625 now; 0.5 + 0.5 cos(0.375 pi) = 0.691 of C7's.
    assert capsys.readouterr().err.splitlines()[-1] == (
        "jrec: from step 5 on this is a run of 16 steps instead of 8, and the learning rates decay until its end in 11"
        " steps: lr_schedule is 0.625 instead of 0.25 (optimizer 0.03125 instead of 0.0125, optimizer.embedding 0.00625"
        " instead of 0.0025); optimizer.embedding.tables.C7.lr_schedule is 0.6913 instead of 0.1464 (C7 0.006913"
        " instead of 0.001464)"
    )
    record = lengths_of(longer)[0]
    assert record["factors"]["lr_schedule"] == {"before": 0.25, "now": 0.625}
    assert "max_steps = 16" in (longer / "config.toml").read_text()
    assert train(configure(*DECAYS, "max_steps=16"), resume=True).step == 16  # of the same length now
    assert "instead" not in capsys.readouterr().err


def test_a_run_cannot_end_before_the_step_that_it_goes_on_from(configure, tmp_path, dataset):
    train(configure("max_steps=5"))
    config = configure("max_steps=4")
    for refuses in (train, check_start):
        options = {"overwrite": False} if refuses is check_start else {}
        with pytest.raises(ConfigError, match=r"max_steps=4 .* 4 steps, but .*run has a checkpoint of step 5 already"):
            refuses(config, resume=True, **options)
    keys = [f"data.path={dataset}", f"out={tmp_path / 'run'}", "max_steps=4"]
    assert main(["train", str(tmp_path / "tiny.toml"), *keys, "--resume-from", "5"]) == 2
    assert "max_steps = 5" in (tmp_path / "run" / "config.toml").read_text()
    assert train(configure("max_steps=5"), resume=True).step == 5


def test_a_run_that_ended_early_says_so(configure, tmp_path, dataset, capsys):
    keys = [
        "max_steps=6", "evaluate.every_steps=1", "evaluate.early_stopping.patience=1", "optimizer.learning_rate=1",
        "optimizer.embedding.learning_rate=1.0", f"data.path={dataset}", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    configure()
    command = ["train", str(tmp_path / "tiny.toml"), *keys]
    assert main(command) == 0
    step = int((max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda p: int(p.name))).name)
    assert step < 6
    capsys.readouterr()
    assert main([*command, "max_steps=9", "--resume"]) == 0
    err = capsys.readouterr().err
    assert f"ended early, after step {step} of 9" in err
    assert "evaluate.early_stopping.patience" in err
