"""A small click log of a shop as CSV, whose days share most of their users and items, and its dataset and runs."""

import pathlib

import numpy as np

from jrec import cli
from jrec.app.config import load_config
from jrec.app.loop import train

TWO_FEATURES = """
name = "shop"
[label]
column = "click"
[[dense]]
column = "price"
transform = "log1p"
missing = 0
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
SCHEMA = f"""{TWO_FEATURES}
[[categorical]]
column = "history"
table = "item"
separator = "|"
max_length = 5
too_long = "last"
weights = "strengths"
"""
CONFIG = """
seed = 5
[data]
batch_size = 64
eval_batch_size = 128
workers = 0
[model]
embedding_dim = 8
bottom_mlp = [8]
top_mlp = [8, 1]
[optimizer.embedding]
learning_rate = 0.05
[evaluate]
every_steps = 0
[log]
tensorboard = false
progress = "off"
"""


def write_log(path: pathlib.Path, rows: int = 1200, *, seed: int = 0, label: bool = True) -> list[dict[str, str]]:
    """Writes a CSV file; returns its lines, values by column. Later seeds have some users and items of their own."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        user, item = int(rng.integers(0, 40)), int(rng.zipf(1.6)) % 60 + 5 * seed
        count = int(rng.integers(0, 8))
        history = [f"i{int(rng.zipf(1.6)) % 60}" for _ in range(count)]
        line = {
            "click": str(int(rng.random() < (0.7 if (user + item) % 3 == 0 else 0.2))),
            "price": "" if rng.random() < 0.1 else f"{rng.gamma(2.0) * 10:.2f}",
            "user": f"u{user + 3 * seed}",
            "item": f"i{item}",
            "history": "|".join(history),
            "strengths": "|".join(f"{rng.random():.3f}" for _ in history),
        }
        lines.append(line if label else {key: value for key, value in line.items() if key != "click"})
    text = [",".join(lines[0])] + [",".join(line.values()) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return lines


def prepare(folder: pathlib.Path, log: pathlib.Path, out: str, *options: str) -> pathlib.Path:
    """Prepares a log; returns the dataset."""
    schema = folder / "shop.toml"
    schema.write_text(SCHEMA)
    arguments = ["prepare", "csv", "--schema", str(schema), "--input", str(log), "--out", str(folder / out)]
    assert cli.main([*arguments, "--quiet", *options]) == 0
    return folder / out


def trained(folder: pathlib.Path, dataset: pathlib.Path, *overrides: str, out: str = "run", **options) -> pathlib.Path:
    """Trains a run on the dataset; returns its folder."""
    path = folder / "shop_run.toml"
    path.write_text(CONFIG)
    run = folder / out
    train(load_config(path, [f"data.path={str(dataset)!r}", f"out={str(run)!r}", *overrides]), **options)
    return run
