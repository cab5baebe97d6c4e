"""Packed batches against a slow reference in plain Python, field by field; and what bad input gets."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pyarrow as pa
import pytest

from jrec.data.blocks import ListColumn
from jrec.data.packed_window import batch_of
from jrec.data.packing import Packer, pack_batch
from jrec.data.packing_columns import join
from jrec.data.schema import DatasetError
from jrec.ops.layout import POOLINGS, EmbeddingLayout, FeatureConfig, TableConfig


def lists(examples, dtype):
    offsets = np.cumsum([0, *map(len, examples)])
    return ListColumn(offsets.astype(np.int32), np.array([v for e in examples for v in e], dtype))


@dataclasses.dataclass
class Case:
    """A layout and some examples of it: per feature a list of (id, weight) lists."""

    layout: EmbeddingLayout
    batch_size: int
    labels: list
    dense: list
    examples: dict

    def columns(self, rng):
        columns = {"label": np.array(self.labels, np.float32)}
        columns |= {f"x{j}": np.array(v, np.float32) for j, v in enumerate(self.dense)}
        for stack in self.layout.stacks.values():
            for f in stack.features:
                pairs = self.examples[f.config.name]
                dtype = rng.choice([np.uint8, np.uint16, np.uint32, np.int32, np.int64])
                ids = lists([[i for i, _ in e] for e in pairs], dtype)
                if all(len(e) == 1 for e in pairs) and not f.config.weighted and rng.random() < 0.7:
                    ids = ids.values
                columns[f.config.name] = ids
                if f.config.weighted:
                    columns[f.config.name + ":weight"] = lists([[w for _, w in e] for e in pairs], np.float32)
        return columns


@st.composite
def cases(draw):
    tables = [
        TableConfig(name=f"t{i}", rows=draw(st.integers(1, 40)), dim=draw(st.sampled_from([4, 8])))
        for i in range(draw(st.integers(1, 3)))
    ]
    features = []
    for t in tables:
        for _ in range(draw(st.integers(1, 2))):
            features.append(
                FeatureConfig(
                    name=f"f{len(features)}",
                    table=t.name,
                    max_length=draw(st.sampled_from([1, 1, 2, 3])),
                    pooling=draw(st.sampled_from(POOLINGS)),
                    weighted=draw(st.booleans()),
                    fixed_length=draw(st.booleans()),
                )
            )
    layout = EmbeddingLayout.build(tables, features)
    n = draw(st.integers(0, 7))
    rows = {t.name: t.rows for t in tables}

    def example(f):
        ids = st.tuples(st.integers(0, rows[f.table] - 1), st.floats(-2, 2, width=32))
        return st.lists(ids, min_size=f.max_length if f.fixed_length else 0, max_size=f.max_length)

    return Case(
        layout=layout,
        batch_size=n + draw(st.integers(0 if n else 1, 3)),
        labels=draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)),
        dense=draw(st.lists(st.lists(st.floats(-9, 9, width=32), min_size=n, max_size=n), max_size=2)),
        examples={f.name: draw(st.lists(example(f), min_size=n, max_size=n)) for f in features},
    )


def reference_bags(case, stack, order):
    """Every bag of the stack as a list of (address, weight), feature-major."""
    bags = []
    for f in stack.features:
        for k in range(case.batch_size):
            pairs = case.examples[f.config.name][order[k]] if k < len(order) else []
            n = len(pairs)
            scale = {"mean": lambda n: 1 / n, "sqrtn": lambda n: 1 / math.sqrt(n)}.get(f.config.pooling, lambda n: 1)
            found = [(f.base + i, np.float32(scale(n)) * np.float32(w if f.config.weighted else 1)) for i, w in pairs]
            if f.config.unpooled:
                bags.extend([[p] for p in found] + [[]] * (f.config.max_length - n))
            else:
                bags.append(found)
    return bags


def check(case, batch, order):
    n = len(order)
    np.testing.assert_array_equal(batch.mask, [1] * n + [0] * (case.batch_size - n))
    np.testing.assert_array_equal(batch.labels[:n], np.float32([case.labels[i] for i in order]))
    assert not batch.labels[n:].any()
    assert batch.dense.shape == (case.batch_size, len(case.dense))
    np.testing.assert_array_equal(batch.dense[:n], np.reshape(case.dense, (len(case.dense), len(case.labels))).T[order])
    assert not batch.dense[n:].any()
    assert list(batch.bags) == list(case.layout.stacks)
    for array in (batch.mask, batch.labels, batch.dense):
        assert array.dtype == np.float32
    for name, stack in case.layout.stacks.items():
        found, expected = batch.bags[name], reference_bags(case, stack, order)
        assert found.num_bags == len(expected) == stack.num_bags(case.batch_size)
        assert found.capacity == stack.capacity(case.batch_size)
        assert found.ids.dtype == np.int32
        assert (found.weights is not None) == stack.weighted
        weights = np.ones(found.ids.shape) if found.weights is None else found.weights
        if stack.padded_length is not None:
            assert found.offsets is None
            assert found.ids.shape == (len(expected), stack.padded_length)
            for ids, w, bag in zip(found.ids, weights, expected, strict=True):
                assert ids.tolist() == [i for i, _ in bag] + [-1] * (len(ids) - len(bag))
                if stack.weighted:
                    np.testing.assert_array_equal(w, [x for _, x in bag] + [0] * (len(ids) - len(bag)))
        else:
            assert found.offsets.dtype == np.int32
            end = found.offsets[-1]
            assert found.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
            assert found.ids[:end].tolist() == [i for bag in expected for i, _ in bag]
            assert (found.ids[end:] == -1).all()
            if stack.weighted:
                np.testing.assert_array_equal(weights[:end], [w for bag in expected for _, w in bag])
                assert not weights[end:].any()


@hypothesis.given(case=cases(), seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=150)
def test_batches_equal_the_reference(case, seed):
    rng = np.random.default_rng(seed)
    n, columns = len(case.labels), case.columns(rng)
    dense = [f"x{j}" for j in range(len(case.dense))]
    batch = pack_batch(case.layout, columns, dense=dense, batch_size=case.batch_size)
    check(case, batch, np.arange(n))
    packer = Packer(case.layout, dense=dense)
    prepared = packer.prepare(columns)
    order = rng.permutation(n).astype(np.int32)
    check(case, packer.pack(prepared.take(order), case.batch_size), order)
    begin, end = sorted(rng.integers(0, n + 1, 2).tolist())
    check(case, packer.pack(prepared.take(order).cut(begin, end), case.batch_size), order[begin:end])
    joined = join([prepared.take(order[:begin]), prepared.take(order[begin:])])
    check(case, packer.pack(joined, case.batch_size), order)


@st.composite
def regular(draw):
    """A packer of features of as many ids in every example, with columns, and bounds of pieces."""
    rows = draw(st.sampled_from([5, 70, 2**31 + 7]))
    tables = [
        TableConfig(name=f"t{i}", rows=30 if i else rows, dim=draw(st.sampled_from([4, 8])))
        for i in range(draw(st.integers(1, 3)))
    ]
    features = [
        FeatureConfig(
            name=f"f{i}",
            table=draw(st.sampled_from(tables)).name,
            max_length=draw(st.sampled_from([1, 1, 2, 3])),
            pooling=draw(st.sampled_from(["sum", "max", "none"])),
            fixed_length=draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    features += [FeatureConfig(name=f"last {t.name}", table=t.name) for t in tables]
    layout = EmbeddingLayout.build(tables, features, planned=rows > 2**31)  # whose addresses are int64
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    examples, orders = draw(st.integers(1, 9)), {}
    if draw(st.booleans()):
        orders = {t.name: rng.permutation(t.rows).astype(np.uint32) for t in tables if t.rows < 100}
    columns = {"label": rng.integers(0, 2, examples), "x": rng.normal(size=examples), "y": rng.normal(size=examples)}
    columns["e"] = rng.integers(0, 9, (examples, 2)).astype(np.int32)
    least = {t.name: t.rows for t in tables}
    for f in features:
        columns[f.name] = rng.integers(0, least[f.table], (examples, f.max_length))
    cast = draw(st.sampled_from(["none", "host"]))
    return Packer(layout, dense=["x", "y"], extras=["e"], orders=orders, cast=cast), columns, examples


@hypothesis.given(case=regular(), data=st.data())
@hypothesis.settings(max_examples=100)
def test_what_is_cut_out_of_windows_is_what_is_packed(case, data):
    packer, columns, examples = case
    columns = packer.prepare(columns)
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, examples - 1))
        pieces.append((begin, data.draw(st.integers(begin + 1, examples))))
    size = sum(stop - begin for begin, stop in pieces) + data.draw(st.integers(0, 3))
    window = packer.window(columns, size)
    assert window is not None
    assert packer.window(columns, 5000) is None  # packed batch by batch
    expected = packer.pack(join([columns.cut(*piece) for piece in pieces]), size)
    found = batch_of([(window, *piece) for piece in pieces], size)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    before = jax.tree.map(np.copy, found)
    again = batch_of([(window, *piece) for piece in pieces], size)
    jax.tree.map(lambda leaf: leaf.fill(0), again)  # a batch has memory of its own
    jax.tree.map(np.testing.assert_array_equal, batch_of([(window, *piece) for piece in pieces], size), before)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
def test_lists_of_full_length_are_joined_with_others(pooling, dtype):
    tables = [TableConfig(name=name, rows=300, dim=4) for name in "ab"]
    features = [FeatureConfig(name="a", table="a", max_length=2, pooling=pooling), FeatureConfig(name="b", table="b")]
    layout = EmbeddingLayout.build(tables, features)
    packer = Packer(layout, label=None)
    full, others = [[250, 1], [2, 3], [4, 4]], [[5], [], [6, 7]]
    prepared = [packer.prepare({"a": lists(x, dtype), "b": np.arange(3)}) for x in (full, others)]
    assert [isinstance(piece.ids["a"], ListColumn) for piece in prepared] == [False, True]
    whole = {"a": lists(full + others, dtype), "b": np.array([0, 1, 2, 0, 1, 2])}
    for pieces, order in ((prepared, [0, 1, 2, 3, 4, 5]), (prepared[::-1], [3, 4, 5, 0, 1, 2])):
        expected = packer.pack(packer.prepare(whole).take(np.array(order)), 8)
        jax.tree.map(np.testing.assert_array_equal, packer.pack(join(pieces), 8), expected)
    expected = pack_batch(layout, {"a": lists(full, np.int64), "b": np.arange(3)}, label=None, batch_size=5)
    jax.tree.map(np.testing.assert_array_equal, packer.pack(prepared[0], 5), expected)


def reference_cast(bags, num_rows, capacity, unique):
    """Tensor Casting, Algorithm 2, on bags of NumPy arrays."""
    flat = bags.ids.reshape(-1)
    if bags.offsets is None:
        owner = np.arange(flat.size) // bags.ids.shape[1]
    else:
        owner = np.searchsorted(bags.offsets, np.arange(flat.size), side="right") - 1
    real = (flat >= 0) & (owner < bags.num_bags)
    positions = np.argsort(np.where(real, flat, num_rows), kind="stable")
    total = int(real.sum())
    rows, starts = np.unique(flat[positions[:total]], return_index=True)
    return {
        "rows": np.concatenate([rows, np.full(unique - len(rows), num_rows)]),
        "offsets": np.concatenate([starts, np.full(unique + 1 - len(rows), total)]),
        "sources": np.concatenate([owner[positions[:total]], np.full(capacity - total, bags.num_bags)]),
        "positions": positions,
        "num_unique": len(rows),
    }


@hypothesis.given(case=cases(), seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=100)
def test_casts_equal_a_stable_sort(case, seed):
    dense = [f"x{j}" for j in range(len(case.dense))]
    columns = case.columns(np.random.default_rng(seed))
    batch = pack_batch(case.layout, columns, dense=dense, batch_size=case.batch_size, cast="host")
    check(case, batch, np.arange(len(case.labels)))
    for name, stack in case.layout.stacks.items():
        bags = batch.bags[name]
        unique = stack.unique_capacity(case.batch_size)
        for field, expected in reference_cast(bags, stack.rows, bags.capacity, unique).items():
            found = np.asarray(getattr(bags.cast, field))
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, expected, err_msg=field)


def one_feature(rows=10, **config):
    feature = FeatureConfig(name="item", table="items", **config)
    return EmbeddingLayout.build([TableConfig(name="items", rows=rows, dim=4)], [feature])


ONE_HOT = np.array([3, 12, 9], np.int64)
SETTINGS = [
    {},
    {"pooling": "mean"},
    {"max_length": 2},
    {"max_length": 2, "pooling": "max"},
    {"max_length": 2, "weighted": True},
]


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("bad", [-2, -7, 10, 2**40])
def test_policies_of_bad_ids(config, bad):
    layout = one_feature(**config)
    columns = {"item": np.array([3, bad, 9]), "item:weight": np.ones(3, np.float32)}

    def pack(**options):
        [bags] = pack_batch(layout, columns, label=None, **options).bags.values()
        return bags.ids.reshape(-1)[bags.ids.reshape(-1) >= 0].tolist()

    with pytest.raises(DatasetError, match=rf"id {bad} of feature 'item' in example 1 .* 'items', which has 10 rows"):
        pack()
    assert pack(on_bad_id="clip") == [3, 0 if bad < 0 else 9, 9]
    assert pack(on_bad_id="oov", oov_rows={"items": 5}) == [3, 5, 9]


def test_ids_may_number_some_rows_of_a_table():
    tables = [TableConfig(name="a", rows=100, dim=4), TableConfig(name="b", rows=50, dim=4)]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name, max_length=2) for t in tables])
    columns, orders = {"a": np.array([[2, 0], [1, 2]]), "b": np.array([[49, 3], [0, 7]])}, {"a": np.uint32([5, 17, 99])}
    batch = pack_batch(layout, columns, label=None, orders=orders)
    np.testing.assert_array_equal(batch.bags["d4_float32"].ids, [99, 5, 17, 99, 149, 103, 100, 107])
    more = columns | {"a": np.array([[2, 0], [1, 3]])}
    with pytest.raises(
        DatasetError, match=r"id 3 of feature 'a' in example 1 is outside of table 'a', which has 3 rows"
    ):
        pack_batch(layout, more, label=None, orders=orders)
    clipped = pack_batch(layout, more, label=None, orders=orders, on_bad_id="clip")
    assert clipped.bags["d4_float32"].ids[2:4].tolist() == [17, 99]
    for bad in (np.uint32([5, 100]), np.zeros(101, np.uint32), np.int64([5]), np.zeros(0, np.uint32)):
        with pytest.raises(ValueError, match=r"order of table 'a' must be uint32 rows of its 100, one for every id"):
            pack_batch(layout, columns, label=None, orders={"a": bad})


def test_oov_rows_are_checked():
    for rows, message in [({}, "no OOV row"), ({"items": 10}, "OOV row of table 'items' is 10")]:
        with pytest.raises(ValueError, match=message):
            Packer(one_feature(), on_bad_id="oov", oov_rows=rows)
    with pytest.raises(ValueError, match="choose one of raise, clip, oov"):
        Packer(one_feature(), on_bad_id="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="choose one of none, host"):
        Packer(one_feature(), cast="device")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("config", "examples", "message"),
    [
        ({"max_length": 2}, [[1], [1, 2, 3]], "has 3 ids in example 1, but at most max_length=2"),
        ({"max_length": 2, "pooling": "none"}, [[1, 2, 3]], "has 3 ids in example 0, but at most"),
        ({"max_length": 2, "fixed_length": True}, [[1, 2], [1]], "has 1 ids in example 1, but exactly max_length=2"),
        ({"fixed_length": True}, [[1], []], "has 0 ids in example 1, but exactly"),
        ({"max_length": 1}, [[1, 2]], "has 2 ids in example 0"),
    ],
)
def test_lengths_beyond_the_promise_are_errors(config, examples, message):
    with pytest.raises(DatasetError, match=message):
        pack_batch(one_feature(**config), {"item": lists(examples, np.uint8)}, label=None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_must_be_finite(value):
    bad, good = np.array([1, value], np.float32), np.zeros(2, np.float32)
    columns = {"item": np.zeros(2, np.uint8), "x": good, "label": good}
    for name in ("x", "label"):
        with pytest.raises(DatasetError, match=f"'{name}' is {value} in example 1"):
            pack_batch(one_feature(), columns | {name: bad}, dense=["x"])
    for config in ({"weighted": True}, {"weighted": True, "max_length": 2}):
        with pytest.raises(DatasetError, match="weight of feature 'item' in example 1 is NaN or inf"):
            pack_batch(one_feature(**config), columns | {"item:weight": bad})


def test_forms_of_ids_are_equal():
    layout = one_feature(max_length=2, weighted=True)
    pairs = lists([[1, 2], [], [3]], np.uint16)
    weights = lists([[0.5, 1], [], [2]], np.float32)
    matrix = np.array([[1, 2], [-1, -1], [3, -1]])
    matrix_weights = np.array([[0.5, 1], [9, 9], [2, 9]], np.float32)
    arrow = pa.array([[1, 2], [], [3]], pa.list_(pa.uint16()))
    arrow_weights = pa.array([[9.0], [0.5, 1], [], [2]], pa.large_list(pa.float32())).slice(1)
    forms = [(pairs, weights), (matrix, matrix_weights), (arrow, arrow_weights), (pa.chunked_array([arrow]), weights)]
    for ids, given in forms:
        [bags] = pack_batch(layout, {"item": ids, "item:weight": given}, label=None).bags.values()
        assert bags.ids.tolist() == [1, 2, 3, -1, -1, -1]
        assert bags.offsets.tolist() == [0, 2, 2, 3]
        assert bags.weights.tolist() == [0.5, 1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"item": np.zeros(2, np.uint8)}, DatasetError, r"column\(s\) label are missing; there are item"),
        ({"item": np.zeros(2, np.uint8), "label": np.zeros(3)}, ValueError, "equally long"),
        ({"item": np.zeros(2), "label": np.zeros(2)}, ValueError, "ids of 'item' must be integers"),
        ({"item": np.zeros((2, 2, 2), int), "label": np.zeros(2)}, ValueError, r"'item' must be \(examples,\), \(ex"),
        ({"item": np.zeros(2, int), "label": np.zeros((2, 2))}, ValueError, r"'label' must be \(examples,\) numbers"),
        ({"item": np.zeros(2, int), "label": np.array(["a", "b"])}, ValueError, "'label' must be"),
        ({"item": ListColumn(np.array([0, 2, 1]), np.zeros(1, int)), "label": np.zeros(2)}, ValueError, "ascend"),
        ({"item": ListColumn(np.array([0, 1, 9]), np.zeros(2, int)), "label": np.zeros(2)}, ValueError, "ascend"),
    ],
)
def test_bad_columns(columns, error, message):
    with pytest.raises(error, match=message):
        pack_batch(one_feature(max_length=2), columns)


def test_weights_must_match_their_ids():
    layout = one_feature(max_length=2, weighted=True)
    ids = lists([[1, 2], [3]], np.uint8)
    for weights in (lists([[1], [2, 3]], np.float32), np.ones(2, np.float32), np.ones((2, 2), np.float32)):
        with pytest.raises(DatasetError, match="weights of 'item' must have the form and lengths of its ids"):
            pack_batch(layout, {"item": ids, "item:weight": weights}, label=None)
    with pytest.raises(ValueError, match="must be floats"):
        pack_batch(layout, {"item": ids, "item:weight": lists([[1, 1], [1]], np.int32)}, label=None)


def test_too_many_examples():
    with pytest.raises(ValueError, match="3 examples do not fit into a batch of 2"):
        pack_batch(one_feature(), {"item": np.zeros(3, int)}, label=None, batch_size=2)


def test_unique_capacity_counts_small_tables_by_their_rows():
    tables = [TableConfig(name="small", rows=3, dim=4), TableConfig(name="large", rows=1000, dim=4)]
    features = [
        FeatureConfig(name="a", table="small", max_length=5),
        FeatureConfig(name="b", table="large", max_length=2),
        FeatureConfig(name="c", table="large"),
    ]
    [stack] = EmbeddingLayout.build(tables, features).stacks.values()
    assert stack.unique_capacity(10) == 3 + 30
