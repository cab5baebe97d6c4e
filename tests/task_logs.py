"""A log with two labels, clicks and purchases, of which a purchase is known where there was a click."""

import pathlib

import numpy as np

SCHEMA = """
[[labels]]
column = "click"
[[labels]]
column = "bought"
name = "purchase"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
CONFIG = """
seed = 1
[data]
path = "data"
batch_size = 128
eval_batch_size = 256
[model]
embedding_dim = 4
bottom_mlp = [8, 4]
top_mlp = [16, 1]
[model.multi_task]
experts = 2
tower_mlp = [8]
weights = {purchase = 0.5}
[optimizer]
name = "adam"
learning_rate = 0.005
[optimizer.embedding]
learning_rate = 0.1
[evaluate]
every_steps = 20
baselines = "off"
[log]
tensorboard = false
progress = "off"
"""
TASKS = ("click", "purchase")


def columns(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """User, item, price, and labels that depend on them; -1 is one that is not known."""
    rng, tastes = np.random.default_rng(seed), np.random.default_rng(100)
    user, item, price = rng.integers(0, 40, count), rng.integers(0, 15, count), rng.random(count).round(3)
    liking = np.sum(tastes.normal(size=(40, 2))[user] * tastes.normal(size=(15, 2))[item], axis=1)
    click = rng.random(count) < 1 / (1 + np.exp(-2 * liking))
    purchase = rng.random(count) < 1 / (1 + np.exp(6 * price - 2 - liking))
    labels = {
        "click": np.where(rng.random(count) < 0.1, -1, click),
        "bought": np.where(click, purchase, -1),
    }
    return {"user": user, "item": item, "price": price, **labels}


def write_log(path: pathlib.Path, log: dict[str, np.ndarray]) -> str:
    """The log as CSV, an unknown label blank."""
    texts = {
        name: ["" if value == -1 else f"{name}{value}" if name in ("user", "item") else str(value) for value in column]
        for name, column in log.items()
    }
    path.write_text("\n".join([",".join(texts), *map(",".join, zip(*texts.values(), strict=True))]) + "\n")
    return str(path)
