"""A served model takes a delta: what fails leaves the old model, which takes the delta when it is given once more."""

from __future__ import annotations

import pathlib

import numpy as np

from jrec import serving
from jrec.errors import JrecError

COLUMNS = {"price": [0.1, 0.5, 0.9], "user": ["u1", "u2", "unknown"], "item": ["i1", "i2", "i3"]}


def main() -> int:
    """Applies the delta, again where that fails; leaves the last scores in the file ``said``."""
    model = serving.load("export")
    base, before = model.manifest.id, model(COLUMNS)
    code = 0
    while model.manifest.id == base:
        try:
            model.apply("delta")
        except (JrecError, OSError, KeyboardInterrupt) as error:
            code = 130 if isinstance(error, KeyboardInterrupt) else 2
            print("jrec: interrupted" if code == 130 else f"jrec: error: {error}")
            assert model.manifest.id != base or np.array_equal(model(COLUMNS), before), "a third model"
    pathlib.Path("said").write_text(f"{model.manifest.id} {model(COLUMNS).tolist()}")
    return code
