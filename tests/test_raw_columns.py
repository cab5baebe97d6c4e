"""Columns of raw values: those that are read as one give what each gives by itself."""

import dataclasses
import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jrec.data.keys import text_key
from jrec.data.schema import DatasetError
from jrec.prepare.raw_columns import parsed_columns
from jrec.prepare.readers.parse import Field

TEXTS = st.sampled_from(["", "-", "ab12ef90", "AB12EF90", "1", "-2.5", "u17", "a long text of a value", "1e400", "nan"])
VALUES = (
    TEXTS,
    st.one_of(TEXTS, st.none()),
    st.none(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-5, 5),
    st.floats(),
    st.booleans(),
    st.booleans().map(np.bool_),
    st.binary(max_size=3),
    st.one_of(TEXTS, st.integers(0, 3), st.floats(0, 1), st.booleans(), st.none()),
    st.lists(st.integers(0, 3), max_size=2),
)
FIELDS = [
    Field(name=f"{kind} {number}{mark}", kind=kind, missing=(mark,) if mark else (), blank=not number)
    for kind, number, mark in itertools.product(("number", "hex", "text"), (0, 1), ("", "-"))
]
FIELDS += [dataclasses.replace(field, name=f"{field.name}, again") for field in FIELDS]


def read(fields, columns):
    """What columns are read as, or what is said about them."""
    try:
        parsed = parsed_columns(fields, columns, 3)
    except (DatasetError, ValueError) as error:
        return str(error)
    return {name: (column.dtype, column.tobytes()) for name, column in parsed.columns.items()}


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_columns_that_are_read_as_one_are_as_each_by_itself(data):
    fields = data.draw(st.lists(st.sampled_from(FIELDS), min_size=2, max_size=5, unique=True))
    rows = data.draw(st.integers(0, 4))
    kinds = {f.name: data.draw(st.sampled_from(VALUES)) for f in fields}
    columns = {name: data.draw(st.lists(kind, min_size=rows, max_size=rows)) for name, kind in kinds.items()}
    alone = [read([f], {f.name: tuple(columns[f.name])}) for f in fields]  # tuples are not read as one
    if wrong := [said for said in alone if isinstance(said, str)]:
        assert read(fields, columns) in wrong
    else:
        assert read(fields, columns) == {name: column for one in alone for name, column in one.items()}


def test_booleans_beside_integers_are_no_integers():
    first, second = Field(name="first", kind="text"), Field(name="second", kind="text")
    columns = {"first": [np.True_], "second": [1]}
    wanted = {"first": text_key("true"), "second": text_key("1")}
    assert {n: int(k[0]) for n, k in parsed_columns([first, second], columns, 0).columns.items()} == wanted
