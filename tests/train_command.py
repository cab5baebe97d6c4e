"""A run by the command, on a small dataset."""

import json
import pathlib

from run_cases import CONFIG

from jrec.cli import main


def train_command(folder: pathlib.Path, data: pathlib.Path, *overrides: str, out: str = "run", text: str = CONFIG):
    """Trains by `jrec train`; returns the run's folder."""
    (folder / "tiny.toml").write_text(text)
    options = [f"data.path={data}", f"out={folder / out}", "log.progress=off", *overrides]
    assert main(["train", str(folder / "tiny.toml"), *options]) == 0
    return folder / out


def check_goes_on(folder: pathlib.Path, data: pathlib.Path, *, text: str) -> None:
    """Asserts that a run goes on by the same command and --resume: what the dataset settled is no difference."""
    lines = []
    for out, halves in (("whole", [["max_steps=8"]]), ("parts", [["max_steps=4"], ["max_steps=8", "--resume"]])):
        for keys in halves:
            made = train_command(folder, data, "log.every_steps=1", *keys, out=out, text=text)
        records = map(json.loads, (made / "metrics.jsonl").read_text().splitlines())
        lines.append([record["loss"] for record in records if record["split"] == "train"])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 8
