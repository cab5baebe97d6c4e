"""The snippets of docs/pretrained_rows.md run, after the model that the page speaks of, and the files fit the key."""

import pathlib
import re

import jax
import numpy as np

from jrec.app.initial_rows import Vectors

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "pretrained_rows.md"
BEFORE = """
import numpy as np, optax, jrec
from flax import nnx
layout = jrec.EmbeddingLayout.build(
    [jrec.TableConfig(name="item", rows=3, dim=8)], [jrec.FeatureConfig(name="item", table="item")]
)
model = jrec.nn.DLRM(jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,)), layout, rngs=nnx.Rngs(0))
rows = jrec.ops.RowWiseAdagrad(learning_rate=0.05)
optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)
"""


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for snippet in [BEFORE, *re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)]:
            exec(compile(snippet, PAGE.name, "exec"), names)
    np.testing.assert_array_equal(names["run"].rows("item", [2, 0])[:, 0], np.float32([-0.2, 0.1]))
    vectors = Vectors.opened("vectors.parquet", "initial_rows")
    ((values, rows),) = vectors.read()
    assert (vectors.dim, values.to_pylist()) == (8, ["rice", "corn"])
    np.testing.assert_array_equal(rows, names["matrix"])
