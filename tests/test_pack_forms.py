"""Columns of any form and values in the place of row numbers pack to the same batch; what does not fit is refused."""

import types

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from prepare_reference import read_dataset
from prepared_logs import prepared

import jrec
from jrec.data import load_vocabularies, pack_batch
from jrec.data.blocks import ListColumn
from jrec.data.column_forms import form_of
from jrec.data.keys import buckets, text_key
from jrec.data.schema import DatasetError


def polars():
    return pytest.importorskip("polars", reason="polars, an optional way to give columns, is not installed")


def made(form):
    """A column; those of optional libraries are made, or skipped, when they are needed."""
    return form() if callable(form) else form


LISTS = [[1, 2], [], [3], [7, 0]]
ONE = [4, -1, 0, 9]


def layout_of(rows=10, **config):
    tables = [jrec.TableConfig(name="items", rows=rows, dim=4), jrec.TableConfig(name="users", rows=rows, dim=4)]
    features = [
        jrec.FeatureConfig(name="item", table="items", max_length=2, **config),
        jrec.FeatureConfig(name="user", table="users"),
    ]
    return jrec.EmbeddingLayout.build(tables, features)


def equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def list_column(lists, dtype=np.int64):
    return ListColumn(np.cumsum([0, *map(len, lists)]), np.array([i for one in lists for i in one], dtype))


WANTED = {"item": list_column(LISTS), "user": list_column([[4], [], [0], [9]])}
ARROW = pa.array([*LISTS[:1], None, *LISTS[2:]])
RAGGED = types.SimpleNamespace(row_splits=np.array([0, 2, 2, 3, 5]), values=np.array([1, 2, 3, 7, 0]))
ITEMS = {
    "Python lists": LISTS,
    "lists with None": [[1, None, 2], None, (3,), np.array([7, 0])],
    "an object array": np.array([np.array(one) for one in LISTS], object),
    "a matrix": np.array([[1, 2], [-1, -1], [3, -1], [7, 0]], np.int8),
    "a matrix of JAX": jnp.array([[1, 2], [-1, -1], [-1, 3], [7, 0]]),
    "a masked matrix": np.ma.masked_array([[1, 2], [5, 5], [3, 5], [7, 0]], [[0, 0], [1, 1], [0, 1], [0, 0]]),
    "rectangular lists": [[1, 2], [-1, -1], [3, -1], [7, 0]],
    "Arrow": ARROW,
    "Arrow's sliced chunks": pa.chunked_array([pa.array([[8], [1, 2]]).slice(1), ARROW.slice(1)]),
    "large lists": ARROW.cast(pa.large_list(pa.uint16())),
    "views of lists": pa.array([*LISTS[:1], None, *LISTS[2:]], pa.list_view(pa.int32())),
    "lists of one size": pa.array([[1, 2], None, [3, None], [7, 0]], pa.list_(pa.uint8(), 2)),
    "polars": lambda: polars().Series([[1, 2], None, [3], [7, 0]]),
    "polars arrays": lambda: polars().Series(
        [[1, 2], None, [3, None], [7, 0]], dtype=polars().Array(polars().UInt32, 2)
    ),
    "a ragged tensor": RAGGED,
    "a list column": list_column([[1, 2], [-1], [-1, 3], [7, 0]], np.int16),
}
USERS = {
    "a list": ONE,
    "a list with None": [4, None, 0, 9],
    "NumPy": np.array(ONE, np.int8),
    "JAX": jnp.array(ONE),
    "Arrow": pa.array([4, None, 0, 9], pa.uint8()),
    "dictionaries": pa.array([4, None, 0, 9]).dictionary_encode(),
    "polars": lambda: polars().Series([4, None, 0, 9]),
    "masked": np.ma.masked_array([4, 7, 0, 9], [0, 1, 0, 0]),
    "uint64": np.array([[4], [2**64 - 1], [0], [9]], np.uint64)[[0, 2, 3]],
}


@pytest.mark.parametrize("form", ITEMS)
def test_forms_of_lists(form):
    layout = layout_of(pooling="mean")
    equal(pack_batch(layout, WANTED | {"item": made(ITEMS[form])}, label=None), pack_batch(layout, WANTED, label=None))


@pytest.mark.parametrize("form", USERS)
def test_forms_of_one_id(form):
    layout, wanted = layout_of(), WANTED
    if form == "uint64":
        wanted = {"item": list_column([LISTS[0], *LISTS[2:]]), "user": list_column([[4], [0], [9]])}
    equal(pack_batch(layout, wanted | {"user": made(USERS[form])}, label=None), pack_batch(layout, wanted, label=None))


def test_all_columns_at_once():
    layout = layout_of()
    numbers = {"price": [1.0, 2.5, 0.0, 3.0], "label": [True, False, True, True]}
    wanted = pack_batch(layout, WANTED | numbers, dense=["price"])
    columns = {"item": [*LISTS[:1], None, *LISTS[2:]], "user": [4, None, 0, 9], **numbers}
    table = pa.table(columns)
    streamed = types.SimpleNamespace(__arrow_c_stream__=table.__arrow_c_stream__)
    for given in (table, table.to_batches()[0], streamed):
        equal(pack_batch(layout, given, dense=["price"]), wanted)
    records = np.array([(4, 1.0, 1), (0, 2.5, 0)], [("user", np.int32), ("price", np.float32), ("label", np.int8)])
    one = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="users", rows=10, dim=4)], [jrec.FeatureConfig(name="user", table="users")]
    )
    by_name = {name: records[name] for name in records.dtype.names}
    equal(pack_batch(one, records, dense=["price"]), pack_batch(one, by_name, dense=["price"]))
    for bad in (records["user"], [1, 2], "items"):
        with pytest.raises(ValueError, match=r"columns must be a mapping from names to arrays.* one batch of a data"):
            pack_batch(layout, bad)
    equal(pack_batch(layout, polars().DataFrame(columns), dense=["price"]), wanted)
    with pytest.raises(ValueError, match=r"columns are a polars.*LazyFrame, which is lazy; give what its collect"):
        pack_batch(layout, polars().LazyFrame(columns))


def test_pandas():
    pandas = pytest.importorskip("pandas", reason="pandas, an optional way to give columns, is not installed")
    frame = pandas.DataFrame(
        {"user": pandas.array([4, None, 0, 9], dtype="Int64"), "item": [LISTS[0], None, *LISTS[2:]]}
    )
    equal(pack_batch(layout_of(), frame, label=None), pack_batch(layout_of(), WANTED, label=None))
    for series in (frame["user"], frame.iloc[0]):
        with pytest.raises(ValueError, match=r"columns are a pandas.*Series, one column or row; give a DataFrame"):
            pack_batch(layout_of(), series, label=None)
    names, vocabularies = (
        frame.assign(user=pandas.Categorical(["b", None, "a", "c"])),
        {"users": {"a": 0, "b": 4, "c": 9}},
    )
    found = pack_batch(layout_of(), names, label=None, vocabularies=vocabularies)
    equal(found, pack_batch(layout_of(), WANTED, label=None))
    with pytest.raises(ValueError, match=r"ids of 'user' must be integers, but are float64; .*\.astype\('Int64'\)"):
        pack_batch(layout_of(), frame.astype({"user": float}), label=None)


def test_batches_of_grain_and_tensorflow():
    layout = layout_of()
    source = [{"item": np.array([i, -1]), "user": f"u{i}", "label": i % 2} for i in range(6)]
    for batch in grain.MapDataset.source(source).batch(3):
        numbers = batch["user"].tolist()
        found = pack_batch(layout, batch, vocabularies={"users": {name: int(name[1:]) for name in numbers}})
        users = np.array([int(name[1:]) for name in numbers])
        equal(found, pack_batch(layout, batch | {"user": users}))
    tensors = {  # as tf.data's as_numpy_iterator gives them, and as tensors that export themselves
        "item": types.SimpleNamespace(__dlpack__=np.zeros((2, 2), int).__dlpack__, __dlpack_device__=lambda: (1, 0)),
        "user": np.array([b"u1", b"u3"], object),
    }
    wanted = pack_batch(layout, {"item": np.zeros((2, 2), int), "user": [1, 3]}, label=None)
    equal(pack_batch(layout, tensors, label=None, vocabularies={"users": {"u1": 1, "u3": 3}}), wanted)


def test_weights_of_absent_ids_are_left_out():
    layout = layout_of(weighted=True, pooling="sum")
    wanted = pack_batch(
        layout, WANTED | {"item:weight": ListColumn(WANTED["item"].offsets, np.arange(5.0))}, label=None
    )
    ids, weights = [[1, None, 2], None, [-1, 3], [7, 0]], [[0.0, None, 1.0], None, [9.0, 2.0], [3.0, 4.0]]
    for given in (weights, pa.array(weights, pa.list_(pa.float32()))):
        equal(pack_batch(layout, WANTED | {"item": ids, "item:weight": given}, label=None), wanted)
    with pytest.raises(DatasetError, match="weight of feature 'item' in example 2 is NaN"):
        pack_batch(layout, WANTED | {"item": ids, "item:weight": [*weights[:2], [9.0, None], [3.0, 4.0]]}, label=None)
    with pytest.raises(ValueError, match="weights of 'item' must be floats, but are texts"):
        pack_batch(layout, WANTED | {"item:weight": [["a", "b"], [], ["c"], ["d", "e"]]}, label=None)


TEXTS = ["a", "longer than a key", "", "ÄÖ", "12345678", "deadbeef"]


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_texts_are_hashed_as_when_prepared(rows):
    layout = layout_of(rows)
    keys = np.array([text_key(text) for text in TEXTS], np.uint64)
    wanted = buckets(keys, rows).astype(np.int64) if rows > 1 else np.zeros(len(keys), np.int64)
    wanted = {"user": wanted, "item": [[row] for row in wanted]}
    text = {"user": TEXTS, "item": [[text] for text in TEXTS]}
    both = {"users": "hash", "items": "hash"}
    array = pa.array(TEXTS)
    forms = [TEXTS, np.array(TEXTS), np.array(TEXTS, np.dtypes.StringDType()), [t.encode() for t in TEXTS], array]
    forms += [array.cast(pa.string_view()), array.dictionary_encode(), pa.chunked_array([array[:2], array[2:]])]
    forms += [lambda: polars().Series(TEXTS), lambda: polars().Series(TEXTS, dtype=polars().Categorical)]
    for user in forms:
        for policy in ("raise", "clip", "oov"):
            found = pack_batch(layout, text | {"user": made(user)}, label=None, vocabularies=both, on_bad_id=policy)
            equal(found, pack_batch(layout, wanted, label=None))
    numbers = [5, 123, 2**40, -17, 2**60, -(2**50)]
    found = pack_batch(layout, wanted | {"user": np.array(numbers)}, label=None, vocabularies={"users": "hash"})
    texts = pack_batch(layout, wanted | {"user": list(map(str, numbers))}, label=None, vocabularies={"users": "hash"})
    equal(found, texts)
    absent = {"user": ["a", None], "item": [["a", None], None]}
    found = pack_batch(layout, absent, label=None, vocabularies=both)
    equal(found, pack_batch(layout, {"user": [wanted["user"][0], -1], "item": [wanted["item"][0], []]}, label=None))


def test_values_without_a_row():
    layout, vocabularies = layout_of(), {"users": {"ann": 3, 17: 4}, "items": {"x": 0, "y": 1}}
    columns = {"user": ["ann", "bob"], "item": [["x"], ["x", "y"]]}
    with pytest.raises(
        DatasetError, match="'bob' of feature 'user' in example 1 is not in the vocabulary of table 'use"
    ):
        pack_batch(layout, columns, label=None, vocabularies=vocabularies)
    with pytest.raises(DatasetError, match=r"'bob' of feature 'user' in example 1 .* choose on_bad_id 'oov'"):
        pack_batch(layout, columns, label=None, vocabularies=vocabularies, on_bad_id="clip")
    found = pack_batch(
        layout, columns, label=None, vocabularies=vocabularies, on_bad_id="oov", oov_rows={"users": 9, "items": 8}
    )
    equal(found, pack_batch(layout, {"user": [3, 9], "item": [[0], [0, 1]]}, label=None))
    with pytest.raises(DatasetError, match="'z' of feature 'item' in example 1 "):
        pack_batch(
            layout, columns | {"user": [17, 17], "item": [[], ["y", "z"]]}, label=None, vocabularies=vocabularies
        )
    with pytest.raises(ValueError, match="on_bad_id is 'oov', but table 'items' has no OOV row"):
        pack_batch(layout, columns, label=None, vocabularies=vocabularies, on_bad_id="oov")
    with pytest.raises(DatasetError, match="id 10 of feature 'user' in example 0 is outside of table 'users'"):
        pack_batch(layout, columns, label=None, vocabularies=vocabularies | {"users": {"ann": 10, "bob": 1}})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"user": ["ann", "bob"]},
            {},
            r"'user' holds texts, such as 'ann' in example 0, but table 'users' has no vocab",
        ),
        ({"item": [[1], ["x"]]}, {}, r"column 'item' is neither ids nor .*, at example 1: \['x'\] .*Python lists"),
        (
            {"user": [3, 2**70]},
            {},
            "column 'user' is neither ids nor lists of them, at example 1: 1180591620717411303424",
        ),
        ({"user": [True, False]}, {}, "ids of 'user' must be integers, but are bool"),
        ({"user": [0.5, 1]}, {}, r"ids of 'user' must be integers, but are .*pandas: .astype\('Int64'\)"),
        ({"item": [[[1]], [[2]]]}, {}, "column 'item' holds list<item: int64>, which are neither"),
        ({"user": "ann"}, {}, r"column 'user' must be \(examples,\), \(examples, length\) or lists, but is <U3\[\]"),
        ({"user": [{"a": 1}, {"a": 2}]}, {}, "column 'user' holds struct"),
        ({"user": np.array([1, 2**63], np.uint64)}, {}, "is outside of table 'users', which has 10 rows"),
        ({}, {"vocabularies": {"user": "hash"}}, "vocabularies name user, but the tables are items, users"),
        ({}, {"vocabularies": {"users": "hsah"}}, "the vocabulary of table 'users' is 'hsah'; give 'hash', a mapping"),
        (
            {"user": ["a", "b"]},
            {"vocabularies": {"users": {"a": 0, "b": "1"}}},
            "'users' must map values to row numbers, not <U",
        ),
        (
            {"user": [b"\xff", b"a"]},
            {"vocabularies": {"users": {"a": 0}}},
            "'0xff' of feature 'user' in example 0 is not in",
        ),
        (
            {"price": [1.0, None]},
            {"dense": ["price"]},
            r"'price' must be \(examples,\) numbers, .*fill missing numbers",
        ),
        ({"price": pa.array([1.0, None])}, {"dense": ["price"]}, "'price' is nan in example 1"),
        ({"price": np.array([[1, 2], [3, np.inf]])}, {"dense": ["price"]}, "'price' is inf in example 1"),
        (
            {"price": np.zeros((2, 1, 3))},
            {"dense": ["price"]},
            r"'price' must be .*, or \(examples, n\), but is float64",
        ),
        ({"price": np.zeros((3, 2))}, {"dense": ["price"]}, "columns must be equally long"),
        ({"clicked": np.zeros((2, 2))}, {"label": "clicked"}, r"label 'clicked' must be \(examples,\) numbers, but is"),
    ],
)
def test_what_does_not_fit(columns, options, message):
    good = {"user": [1, 2], "item": [[1], [2]]}
    with pytest.raises((ValueError, DatasetError), match=message):
        pack_batch(layout_of(), good | columns, **{"label": None, **options})


@pytest.mark.parametrize("examples", [0, 1, 4])
def test_a_dense_column_may_have_several_numbers(examples):
    text = np.arange(3 * examples).reshape(examples, 3) - 1.5
    columns = {"user": ONE[:examples], "item": LISTS[:examples], "price": np.arange(examples), "text": text}
    columns |= {"one": text[:, :1], "nothing": text[:, :0]}
    batch = pack_batch(
        layout_of(), columns, dense=["text", "price", "nothing", "one"], label=None, batch_size=examples + 2
    )
    wanted = np.concatenate([text, np.arange(examples)[:, None], text[:, :1]], axis=1)
    assert batch.dense.dtype == np.float32
    np.testing.assert_array_equal(batch.dense, np.pad(wanted, ((0, 2), (0, 0))))


def test_tensors_that_are_not_on_the_host():
    class OnGpu:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(ValueError, match=r"column 'user', a .*OnGpu, is no array on the host \(can't convert cuda"):
        pack_batch(layout_of(), WANTED | {"user": OnGpu()}, label=None)


@pytest.mark.parametrize("options", [{}, {"max_rows": 3}, {"max_rows": 3, "key_seed": 5}, {"max_rows": 1}])
def test_values_get_the_rows_of_a_prepared_dataset(tmp_path, options):
    rng = np.random.default_rng(0)
    values = {
        "a": rng.choice(["x", "yy", "", "a text longer than a key", "another such text", "ünï"], 60),
        "b": rng.choice([1, 17, -5, 10**9, 2**60], 60),
    }
    text = "label,a,b\n" + "".join(f"{i % 2},{a},{b}\n" for i, (a, b) in enumerate(zip(*values.values(), strict=True)))
    prepared(tmp_path, text, "log", **options)
    schema, stored = read_dataset(tmp_path / "log")
    tables = [jrec.TableConfig(name=t.name, rows=t.rows, dim=4) for t in schema.tables]
    layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=name, table=name) for name in values])
    vocabularies = load_vocabularies(tmp_path / "log", key_seed=options.get("key_seed", 0))
    found = pack_batch(layout, values, label=None, vocabularies=vocabularies)
    equal(found, pack_batch(layout, {name: np.array(stored[name]) for name in values}, label=None))
    unknown = {"a": ["never seen"], "b": [3]}
    if not options:
        with pytest.raises(DatasetError, match="'never seen' of feature 'a' in example 0 is not in the vocabulary"):
            pack_batch(layout, unknown, label=None, vocabularies=vocabularies)
        found = pack_batch(layout, unknown, label=None, vocabularies=vocabularies, on_bad_id="oov")
        rows = {t.name: np.array([t.oov_row]) for t in schema.tables}
        equal(found, pack_batch(layout, rows, label=None))
    if options.get("key_seed"):
        with pytest.raises(DatasetError, match="is not what the schema says for key seed 0; give the --key-seed"):
            load_vocabularies(tmp_path / "log")


@pytest.mark.parametrize("texts", [["a", "é", ""], ["a", None, "b"], [None, "a"], ("b", "a")])
def test_texts_of_a_list_have_the_form_of_arrows_texts(texts):
    read, of_arrow = form_of("x", texts), form_of("x", pa.array(texts))
    assert read.values.equals(of_arrow.values)
    assert read.offsets is of_arrow.offsets is None
    np.testing.assert_array_equal(read.present, of_arrow.present)
