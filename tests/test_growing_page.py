"""The snippet of docs/growing.md runs, after the tables and the model that it speaks of."""

import pathlib
import re

import jax
import numpy as np

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "growing.md"
BEFORE = """
import numpy as np, optax, jrec
from flax import nnx
layout = jrec.EmbeddingLayout.build(
    [jrec.TableConfig(name="user", rows=1000, dim=8)], [jrec.FeatureConfig(name="user", table="user")]
)
config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(8,), top_mlp=(8, 1))
model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
rows = jrec.ops.RowWiseAdagrad(learning_rate=0.05)
optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)
draw = np.random.default_rng(0)
def columns(day):
    users = [f"user {n}" for n in draw.integers(100 * day, 100 * day + 400, 64)]
    return {"label": draw.integers(0, 2, 64), "price": draw.random(64, np.float32), "user": users}
batches = [columns(day) for day in range(20)]
examples = {name: column for name, column in columns(19).items() if name != "label"}
"""


def test_the_snippet_of_the_page_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(BEFORE + snippet, PAGE.name, "exec"), names)
    counts = names["run"].growing["user"].counts
    assert counts.lookups == 20 * 64
    assert 0 < counts.admitted < counts.lookups - counts.oov_lookups
    assert np.isfinite(names["scores"]).all()
