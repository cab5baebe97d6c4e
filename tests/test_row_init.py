"""Initial rows: their distribution, and that they depend on seed and table alone."""

import jax
import numpy as np
from flax import nnx

from jrec.nn import EmbeddingCollection
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.row_init import init_rows

TABLE = TableConfig(name="site", rows=4096, dim=16)


def test_rows_are_uniform_within_the_bound():
    rows = np.asarray(init_rows(TABLE, jax.random.key(0)), np.float64) * 64
    assert -1 < rows.min() < -0.999
    assert 0.999 < rows.max() < 1
    quantiles = np.quantile(rows, [0.1, 0.25, 0.5, 0.75, 0.9])
    np.testing.assert_allclose(quantiles, [-0.8, -0.5, 0, 0.5, 0.8], atol=0.015)


def test_a_table_starts_alike_whatever_it_is_stacked_with():
    def stacks(*tables):
        features = [FeatureConfig(name=t.name, table=t.name) for t in tables]
        layout = EmbeddingLayout.build(tables, features)
        return EmbeddingCollection(layout, rngs=nnx.Rngs(7)).arrays()["d16_float32"]

    other = TableConfig(name="app", rows=10, dim=16)
    alone, behind = stacks(TABLE), stacks(other, TABLE)
    np.testing.assert_array_equal(alone, behind[10:])
    assert not np.array_equal(behind[:10], alone[:10])
