"""A log whose later examples read far more distinct rows than its first ones, in each half of its training split."""

import pathlib

import numpy as np

from jrec import cli

SCHEMA = """
name = "skewed"
[label]
column = "click"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "words"
separator = "|"
max_length = 4
"""
TRAINING = 768


def skewed_dataset(folder: pathlib.Path) -> pathlib.Path:
    """Prepares it; 768 training examples, of which the last third of either half reads other rows in every example."""
    rng = np.random.default_rng(0)
    lines = ["click,price,user,words"]
    for number in range(TRAINING * 10 // 8):
        late = number % (TRAINING // 2) >= TRAINING // 3
        user, words = (number, range(4 * number, 4 * number + 4)) if late else (rng.integers(3), rng.integers(0, 8, 2))
        lines.append(f"{rng.integers(2)},{rng.random():.3f},{user},{'|'.join(map(str, words))}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "schema.toml").write_text(SCHEMA)
    command = ["prepare", "csv", "--input", str(folder / "log.csv"), "--schema", str(folder / "schema.toml")]
    command += ["--out", str(folder / "data"), "--split", "0.8,0.1,0.1", "--block-size", "64"]
    command += ["--min-count", "1", "--quiet"]
    assert cli.main(command) == 0
    return folder / "data"
