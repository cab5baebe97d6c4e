"""Initial rows: their distribution, and that they depend on seed and table alone."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from whole_stacks import whole_stack

from jrec import ops
from jrec.host import HostTable
from jrec.nn import EmbeddingCollection
from jrec.nn.embeddings import init_stack
from jrec.ops import row_fill
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.row_init import init_rows, init_rows_at
from jrec.ops.storage import pad
from jrec.ops.tt import TTShape, tt_to_dense
from jrec.run.placement.plan import default_plan
from jrec.run.placement.rows import initial_stack

KEY = jax.random.key(3)
TABLE = TableConfig(name="site", rows=4096, dim=16)


def _layout(*tables, planned=False):
    return EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables], planned=planned)


def test_rows_are_uniform_within_the_bound():
    rows = np.asarray(init_rows(TABLE, jax.random.key(0)), np.float64) * 64
    assert -1 < rows.min() < -0.999
    assert 0.999 < rows.max() < 1
    quantiles = np.quantile(rows, [0.1, 0.25, 0.5, 0.75, 0.9])
    np.testing.assert_allclose(quantiles, [-0.8, -0.5, 0, 0.5, 0.8], atol=0.015)


def test_rows_without_a_bound_of_their_own_begin_as_in_every_version():
    tables = TABLE, TableConfig(name="app", rows=10, dim=16)
    sums = [zlib.crc32(np.asarray(init_rows(table, KEY)).tobytes()) for table in tables]
    assert sums == [0x1471B917, 0x7B7ED8A6]


def _by_pieces(tables):
    (stack,) = _layout(*tables).members
    return init_stack(stack, KEY)


def _by_host(tables):
    (stack,) = _layout(*tables).members
    return HostTable(stack, ops.SGD(learning_rate=0.1), KEY).fetch(np.arange(stack.rows, dtype=np.int32))[0]


def _by_mesh(tables):
    layout = _layout(*tables, planned=True)
    (stack,), plan = layout.members, default_plan(layout, 2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    return whole_stack(stack, plan, initial_stack(stack, plan, mesh, KEY, None))[0]


MAKERS = {
    "whole tables": lambda tables: jnp.concatenate([init_rows(table, KEY) for table in tables]),
    "pieces": _by_pieces,
    "host": _by_host,
    "mesh": _by_mesh,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_bound_scales_the_rows_of_its_table_alone_whoever_makes_them(maker, dtype):
    plain = TableConfig(name="app", rows=10, dim=16, dtype=dtype)
    rows = MAKERS[maker]((plain, TableConfig(name="site", rows=4096, dim=16, dtype=dtype, initial_bound=0.3)))
    odd = np.asarray(init_rows(TABLE, KEY)) * np.float32(2**30)  # 1/sqrt(4096) / 2^24: exact
    np.testing.assert_array_equal(np.asarray(rows)[10:], (odd * np.float32(0.3 / 2**24)).astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(np.asarray(rows)[:10], init_rows(plain, KEY))


def test_cores_begin_with_the_variance_of_rows_within_the_bound():
    shape = TTShape.search(4000, 16, ranks=8)
    table = TableConfig(name="site", rows=4000, dim=16, tier="tt", tt_shape=shape, initial_bound=0.6)
    cores = EmbeddingCollection(_layout(table), rngs=nnx.Rngs(7)).tt["tt_site"].arrays()
    assert np.std(tt_to_dense(cores, shape)) == pytest.approx(0.6 / 3**0.5, rel=0.1)


@pytest.mark.parametrize("bound", [0.0, -0.5, 1e5, float("nan")])
def test_a_bound_that_no_rows_can_have_is_refused(bound):
    with pytest.raises(ValueError, match=f"table 'site' has initial_bound {bound}; choose one from 1e-06 to 10000"):
        TableConfig(name="site", rows=4096, dim=16, initial_bound=bound)


def test_a_table_starts_alike_whatever_it_is_stacked_with():
    def stacks(*tables):
        return EmbeddingCollection(_layout(*tables), rngs=nnx.Rngs(7)).arrays()["d16_float32"]

    other = TableConfig(name="app", rows=10, dim=16)
    alone, behind = stacks(TABLE), stacks(other, TABLE)
    np.testing.assert_array_equal(alone, behind[10:])
    assert not np.array_equal(behind[:10], alone[:10])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pad_rows", [False, True])
def test_rows_made_in_pieces_are_those_of_whole_tables(monkeypatch, dtype, pad_rows):
    monkeypatch.setattr(row_fill, "_MADE_ELEMENTS", 700)  # 100 rows at a time: tables and pieces cross each other
    tables = [TableConfig(name=f"t{i}", rows=rows, dim=7, dtype=dtype) for i, rows in enumerate((1, 250, 99, 3))]
    (stack,) = _layout(*tables).members
    rows = init_stack(stack, KEY, pad_rows=pad_rows)
    whole = jnp.concatenate([init_rows(table, KEY) for table in tables])
    np.testing.assert_array_equal(rows, pad(whole) if pad_rows else whole)


def test_making_rows_takes_a_few_megabytes_besides_them():
    (stack,) = _layout(*(TableConfig(name=f"t{i}", rows=2**20 + i, dim=16) for i in range(4))).members
    used = jax.jit(lambda key: init_stack(stack, key)).lower(KEY).compile().memory_analysis()
    assert used is not None
    assert used.output_size_in_bytes >= 4 * 2**20 * 64
    assert used.temp_size_in_bytes < 64 << 20, "random bits of whole tables took 7.2 GiB for tables of 2.2 GB"


def test_keys_of_other_generators_make_rows_on_a_device_and_are_refused_where_rows_are_made_one_by_one():
    key = jax.random.key(1, impl="rbg")
    (stack,) = _layout(TABLE, TableConfig(name="app", rows=10, dim=16)).members
    assert init_stack(stack, key).shape == (4106, 16)
    with pytest.raises(ValueError, match="the key is of rbg; use"):
        init_rows_at(stack.tables, stack.bases, key, jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize("shape", [(1000, 3), (1000,)])
@pytest.mark.parametrize("lengths", [[1000], [1] * 1000, [7, 600, 393], [999, 1]])
def test_filled_rows_are_the_pieces_in_order(monkeypatch, shape, lengths):
    monkeypatch.setattr(row_fill, "PIECE_BYTES", 12 * 64)
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    buffer = np.empty((max(lengths), *shape[1:]), np.float32)  # one for all pieces, as a reader may have it

    def pieces():
        begin = 0
        for length in lengths:
            buffer[:length] = rows[begin : begin + length]
            yield buffer[:length]
            begin += length

    np.testing.assert_array_equal(row_fill.fill_rows(shape, "float32", pieces()), rows)


def test_pieces_that_do_not_make_the_array_are_refused():
    for pieces, message in (
        ([np.zeros((3, 2), np.float32)], "the pieces are 3 rows"),
        ([np.zeros((5, 2), np.float32)], r"a piece of \(5, 2\) float32 does not fit behind row 0"),
        ([np.zeros((4, 3), np.float32)], "does not fit"),
        ([np.zeros((4, 2), np.float16)], "float16 does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            row_fill.fill_rows((4, 2), np.float32, pieces)
