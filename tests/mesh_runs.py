"""The shapes of a small model, and its batches: what tests of the mesh share."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax

from jrec import ops
from jrec.batch import Batch
from jrec.data.packing import pack_batch
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.tt import TTShape

EXAMPLES, SEED = 24, 3
SIZES = {"site": 40, "user": 5, "item": 300, "word": 90}
WHOLE_ROWS = 4  # of "item", where it comes in parts
FEATURES = (
    FeatureConfig(name="site", table="site"),
    FeatureConfig(name="user", table="user", max_length=3, pooling="mean"),
    FeatureConfig(name="item", table="item", max_length=6, weighted=True),
    FeatureConfig(name="seen", table="item", max_length=4, pooling="max"),
    FeatureConfig(name="word", table="word", max_length=2),
)
OPTIMIZERS = {
    "sgd": ops.SGD(learning_rate=0.1),
    "momentum": ops.Momentum(learning_rate=0.05),
    "adagrad": ops.Adagrad(learning_rate=0.1, weight_decay=1e-3),
    "rowwise_adagrad": ops.RowWiseAdagrad(learning_rate=0.1, max_row_norm=1.0),
    "rmsprop": ops.RMSProp(learning_rate=0.01),
    "adam": ops.Adam(learning_rate=optax.linear_schedule(0.02, 0.01, 20)),
}


def layout(*, dtype: str = "float32", tt: bool | str = True) -> EmbeddingLayout:
    """Ragged bags of all kinds, placed by a plan; one table is a tensor train, and with "parts" the tail of another."""
    tables = []
    for name, rows in SIZES.items():
        if tt == "parts" and name == "item":
            of: dict[str, Any] = {"name": name, "dim": 8, "dtype": dtype, "of_rows": rows}
            tail = TTShape.search(rows - WHOLE_ROWS, 8, ranks=3)
            tables.append(TableConfig(rows=WHOLE_ROWS, **of))
            tables.append(TableConfig(rows=tail.rows, tier="tt", tt_shape=tail, first_row=WHOLE_ROWS, **of))
            continue
        shape = TTShape.search(rows, 8, ranks=3) if tt and name == "word" else None
        tier = "sharded" if shape is None else "tt"
        tables.append(TableConfig(name=name, rows=rows, dim=8, dtype=dtype, tier=tier, tt_shape=shape))
    return EmbeddingLayout.build(tables, FEATURES, planned=True)


def batches(of: EmbeddingLayout, steps: int, *, examples: int = EXAMPLES) -> list[Batch]:
    """Skewed ids, bags of every length from 0 on; the last of many is not full, and some parts of it are empty."""
    found = []
    for number in range(steps):
        rng = np.random.default_rng(number)
        n = examples if number < steps - 1 or steps == 1 else examples // 3
        columns: dict[str, Any] = {"label": rng.integers(0, 2, n).astype(np.float32)}
        columns |= {f"x{i}": rng.normal(size=n).astype(np.float32) for i in range(3)}
        for feature in FEATURES:
            least = 1 if feature.max_length == 1 else 0
            lengths = rng.integers(least, feature.max_length + 1, n)
            ids = np.full((n, feature.max_length), -1, np.int64)
            for row, length in zip(ids, lengths, strict=True):
                row[:length] = np.minimum(rng.zipf(1.3, length) - 1, SIZES[feature.table] - 1)
            columns[feature.name] = ids[:, 0] if feature.max_length == 1 else ids
            if feature.weighted:
                columns[f"{feature.name}:weight"] = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
        found.append(pack_batch(of, columns, dense=["x0", "x1", "x2"], batch_size=examples))
    return found
