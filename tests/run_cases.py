"""What tests of whole runs share: a configuration, and synthetic click logs to train it on."""

import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import numpy as np

from jrec.app.config import load_config
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

CONFIG = """
seed = 3
[data]
batch_size = 256
eval_batch_size = 512
window_blocks = 2
[model]
embedding_dim = 8
bottom_mlp = [16, 8]
top_mlp = [16, 1]
[optimizer]
learning_rate = 0.05
[optimizer.embedding]
name = "adam"
learning_rate = 0.01
[evaluate]
every_steps = 8
batches = 2
[checkpoint]
every_steps = 5
[log]
every_steps = 4
tensorboard = false
"""


def configuring(tmp_path, dataset, text):
    """What loads a configuration with overrides, each run in a folder of its own name."""
    path = tmp_path / "tiny.toml"
    path.write_text(text)

    def load(*overrides, out="run"):
        return load_config(path, [f"data.path={str(dataset)!r}", f"out={str(tmp_path / out)!r}", *overrides])

    return load


def quickstart(folder: pathlib.Path, rows: int = 6000) -> pathlib.Path:
    """Makes a dataset of so many examples, of which eight in ten are for training."""
    synthesize(shape_like("quickstart"), folder / "quickstart", SynthOptions(rows=rows, seed=1))
    return folder / "quickstart"


def killed_and_resumed(
    command: Sequence[str],
    run: pathlib.Path,
    *,
    most: int = 4,
    least: int = 3,
    seconds: Callable[[np.random.Generator], float] = lambda rng: rng.exponential(0.05),
) -> None:
    """Kills a command, which goes on with the run in its folder, around its checkpoints; then lets it end.

    Args:
      command: The command.
      run: The run's folder.
      most: How often it is killed, unless it ends before.
      least: How often it must have been killed.
      seconds: Draws how long after the first sign of a checkpoint.
    """
    rng, kills, folder = np.random.default_rng(1), 0, run / "checkpoints"

    def names():
        return set(folder.iterdir()) if folder.exists() else set()

    while kills < most:
        before = names()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and not names() - before:
                time.sleep(0.005)  # the first sign of a checkpoint: some kills fall while it is written
            time.sleep(float(seconds(rng)))
            if process.poll() is not None:
                assert process.returncode == 0, process.stderr.read()
                break
            process.send_signal(signal.SIGKILL)
        kills += 1
    assert kills >= least, "the run finished before it could be killed often enough"
    subprocess.run(command, check=True, capture_output=True)
