"""What is learnt of numbers: standardized features and buckets of quantiles, exact, of training alone, and reused."""

import json

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec.data.schema import DatasetError, Schema
from jrec.prepare.encoder import Encoder
from jrec.prepare.fit import moments, quantiles
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, load_schema
from jrec.prepare.readers.delimited_schema import MAX_QUANTILES

SCHEMA = """
label.column = "y"
time.column = "at"
[[dense]]
column = "year"
transform = "standardize"
missing = 2000
[[categorical]]
column = "price"
quantiles = 4
[[categorical]]
column = "c"
"""
NUMBERS = hnp.arrays(np.float64, st.integers(0, 60), elements=st.floats(allow_infinity=False, width=64))


def chunked(values, size):
    return lambda: (values[at : at + size] for at in range(0, len(values), size))


@hypothesis.given(NUMBERS, st.integers(2, 9), st.integers(1, 20))
def test_quantiles_are_those_of_the_sorted_values(values, count, size):
    present = np.sort(values[~np.isnan(values)] + 0.0)
    expected = [present[k * len(present) // count] for k in range(1, count)] if len(present) else []
    assert quantiles(chunked(values, size), count) == tuple(np.unique(expected))


@hypothesis.given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(-1e9, 1e9), st.integers(1, 7))
def test_moments_are_those_of_all_values(values, shift, size):
    values = np.array(values) + shift
    mean, deviation = moments(chunked(values, size))
    tolerance = 1e-12 * np.abs(values).max()
    np.testing.assert_allclose(mean, values.mean(), rtol=1e-12, atol=tolerance)
    if deviation != 1.0:
        np.testing.assert_allclose(deviation, values.std(), rtol=1e-9, atol=tolerance)
    else:
        assert values.std() <= tolerance or np.isclose(values.std(), 1.0)


@pytest.mark.parametrize("value", [0.1, 0.3, -7.7, 123.456, 0.0])
@pytest.mark.parametrize("count", [1, 3, 10, 1000])
def test_a_constant_has_no_deviation_whatever_its_mean_is_rounded_to(value, count):
    assert moments(chunked(np.full(count, value), 7)) == (value, 1.0)


@pytest.mark.parametrize("value", [0.1, -7.7, 1e100])
def test_numbers_that_differ_by_rounding_have_no_deviation(value):
    values = value * (1 + np.finfo(np.float64).eps * np.tile([0.0, 1.0, 2.0], 9))
    assert moments(chunked(values, 7)) == (pytest.approx(value), 1.0)
    wider = moments(chunked(value * (1 + 1e-12 * np.arange(9)), 7))
    assert wider[1] == pytest.approx(abs(value) * 1e-12 * np.arange(9).std(), rel=1e-3)


def made(folder, name, lines, schema=SCHEMA, **options):
    (folder / "schema.toml").write_text(schema)
    (folder / f"{name}.csv").write_text("y,at,year,price,c\n" + "\n".join(lines) + "\n")
    source = Delimited(load_schema(str(folder / "schema.toml")))
    settings = PrepareOptions(**{"split": (0.5, 0, 0.5), "min_count": 1, **options})
    return prepare(source, [str(folder / f"{name}.csv")], folder / name, settings)


def log(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    years, prices = rng.integers(1950, 2024, rows), np.round(rng.lognormal(3, 2, rows), 2)
    lines = [
        f"{i % 2},{rows - i},{'' if i % 7 == 0 else years[i]},{'' if i % 11 == 0 else prices[i]},{'ab'[i % 2]}"
        for i in range(rows)
    ]
    years[::7] = 2000
    prices[::11] = np.nan
    return lines, years[::-1].astype(float), prices[::-1]


def test_a_log(tmp_path):
    lines, years, prices = log()
    schema = made(tmp_path, "monday", lines)
    mean, deviation = years[:200].mean(), years[:200].std()
    assert schema.dense[0].mean == pytest.approx(mean, rel=1e-13)
    assert schema.dense[0].deviation == pytest.approx(deviation, rel=1e-13)
    present = np.sort(prices[:200][~np.isnan(prices[:200])])
    boundaries = [present[k * len(present) // 4] for k in (1, 2, 3)]
    assert schema.categorical[0].boundaries == tuple(boundaries)
    _, columns = read_dataset(tmp_path / "monday")
    np.testing.assert_allclose(columns["year"], ((years - mean) / deviation), rtol=1e-6, atol=1e-6)
    values = read_vocabulary(tmp_path / "monday", schema.table("price"))[0]
    expected = ["" if np.isnan(p) else str(sum(b <= p for b in boundaries)) for p in prices]
    assert [values[i] for i in columns["price"]] == expected
    assert sorted(filter(None, values)) == ["0", "1", "2", "3"]


def test_a_later_log_uses_what_was_learnt(tmp_path):
    schema = made(tmp_path, "monday", log()[0])
    lines, years, prices = log(100, seed=1)
    later = made(tmp_path, "tuesday", lines, split=(0, 0, 1), min_count=2, vocabulary_from=str(tmp_path / "monday"))
    assert later.dense == schema.dense
    assert later.categorical == schema.categorical
    assert later.identity.rows == schema.identity.rows
    _, columns = read_dataset(tmp_path / "tuesday")
    feature = schema.dense[0]
    np.testing.assert_allclose(columns["year"], (years - feature.mean) / feature.deviation, rtol=1e-5, atol=1e-6)
    encoder = Encoder(Schema.load(tmp_path / "monday"))
    encoded = encoder.columns({"year": years, "price": prices, "c": [line[-1] for line in lines[::-1]]})
    assert encoded.dense[:, 0].tolist() == columns["year"]
    assert encoded.ids["price"].tolist() == columns["price"]
    streamed = next(encoder.stream(str(tmp_path / "tuesday.csv"), batch_size=100))
    assert streamed.dense[::-1, 0].tolist() == columns["year"]
    assert streamed.ids["price"][::-1].tolist() == columns["price"]
    assert made(tmp_path, "other", lines, min_count=1).identity.rows != schema.identity.rows


def test_datasets_without_learnt_numbers_say_nothing_of_them(tmp_path):
    schema = '[label]\ncolumn = "y"\n[[dense]]\ncolumn = "at"\nmissing = 0\n[[categorical]]\ncolumn = "c"\n'
    made(tmp_path, "out", log()[0], schema)
    content = json.loads((tmp_path / "out" / "schema.json").read_text())
    assert content["dense"] == [{"name": "at", "transform": "none"}]
    assert "boundaries" not in content["categorical"][0]


def test_constants_and_large_values(tmp_path):
    lines = ["1,1,5,1,a", "0,2,5,1,a", "0,3,3e38,1,a", "1,4,-3e38,1,a"]
    made(tmp_path, "out", lines)
    assert read_dataset(tmp_path / "out")[1]["year"] == [0, 0, np.float32(3e38), np.float32(-3e38)]
    with pytest.raises(DatasetError, match="holds '1e39', which is too large for float32"):
        made(tmp_path, "bad", ["1,1,1e39,1,a"])
    with pytest.raises(DatasetError, match="field 'price' holds 'much', which is not a number"):
        made(tmp_path, "bad", ["1,1,1,much,a"])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (SCHEMA.replace("= 4", "= 1"), f"quantiles is 1; it must be 2 to {MAX_QUANTILES:,}"),
        (SCHEMA.replace("= 4", '= 4\nseparator = "|"'), "quantiles are of a column of numbers; leave out separator"),
        (SCHEMA.replace('"standardize"', '"standard"'), "choose one of none, log1p, signed_log1p, standardize"),
    ],
)
def test_bad_schemas(tmp_path, schema, message):
    with pytest.raises(DatasetError, match=message):
        made(tmp_path, "out", [], schema)
