"""A run by the command, on a small dataset."""

import pathlib

from run_cases import CONFIG

from jrec.cli import main


def train_command(folder: pathlib.Path, data: pathlib.Path, *overrides: str, out: str = "run", text: str = CONFIG):
    """Trains by `jrec train`; returns the run's folder."""
    (folder / "tiny.toml").write_text(text)
    options = [f"data.path={data}", f"out={folder / out}", "log.progress=off", *overrides]
    assert main(["train", str(folder / "tiny.toml"), *options]) == 0
    return folder / out
