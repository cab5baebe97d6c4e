"""What synthetic datasets look like: the published sizes of public click logs, RM1 to RM4, and a quickstart."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Literal

from jrec.data.schema import CategoricalFeature, DatasetError, DenseFeature
from jrec.json_values import JsonObject

Origin = Literal["power", "hour", "weekday", "parent", "history"]
_ROWS_RM = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthFeature:
    """A categorical feature and where its ids come from.

    ``origin`` "power" draws them from a power law, "hour" and "weekday" take them from the example's time, and "parent"
    makes them a fixed function of the ids of feature ``parent``, as an item has its category. "history" draws from a
    power law, too, but some users have been at the item of ``parent`` before, more or less often.
    """

    feature: CategoricalFeature
    origin: Origin = "power"
    parent: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A kind of click log.

    Attributes:
      name: What it is like.
      dense: How many count features there are; they are called I1, I2 … and stored as log1p.
      features: The categorical features.
      rows: How many rows each table has.
      click_rate: The share of positive labels to calibrate to.
      days: How long the log lasts; popularity drifts from day to day.
      exponent: The exponent of the ids' power law; rank k has probability proportional to k ** -exponent.
      logit_std: Spread of the teacher's logits, which sets how well labels can be predicted at best.
      head: Ranks below about this have full effect on the label; beyond, it fades as 1 / sqrt(rank / head).
      shares: The shares of the logits' variance due to single rows, to pairs of features, to dense features, and to
        what histories and targets have in common.
      matches: Pairs of a target's feature and its history: what they have in common counts the more the later it is.
      sources: Where the figures are from.
    """

    name: str
    dense: int
    features: tuple[SynthFeature, ...]
    rows: Mapping[str, int]
    click_rate: float
    days: int
    exponent: float = 1.05
    logit_std: float = 1.2
    head: int = 1000
    shares: tuple[float, ...] = (0.5, 0.3, 0.2, 0.0)
    matches: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def dense_features(self) -> tuple[DenseFeature, ...]:
        """The dense features as the schema has them."""
        return tuple(DenseFeature(name=f"I{i + 1}", transform="log1p") for i in range(self.dense))

    @property
    def categorical(self) -> tuple[CategoricalFeature, ...]:
        """The categorical features as the schema has them."""
        return tuple(f.feature for f in self.features)

    @property
    def ids_per_example(self) -> int:
        """The most ids an example has."""
        return sum(f.feature.max_length for f in self.features)

    def capped(self, rows: int) -> Shape:
        """The shape with no table above ``rows`` rows."""
        return dataclasses.replace(self, rows={name: min(n, rows) for name, n in self.rows.items()})


def one_hot(name: str, origin: Origin = "power", parent: str | None = None) -> SynthFeature:
    """A feature with one id an example and a table of its own."""
    feature = CategoricalFeature(name=name, table=name, max_length=1, fixed_length=True)
    return SynthFeature(feature=feature, origin=origin, parent=parent)


@functools.cache
def _published() -> JsonObject:
    path = pathlib.Path(__file__).with_name("cardinalities.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _figures(name: str) -> JsonObject:
    published = _published()[name]
    return {
        "name": name,
        "click_rate": published["click_rate"]["value"],
        "days": published["days"]["value"],
        "sources": tuple(f"{key}: {published[key]['source']}" for key in ("rows", "click_rate", "days")),
    }


def _criteo(name: str, logit_std: float) -> Shape:
    rows = {f"C{i + 1}": n for i, n in enumerate(_published()[name]["rows"]["C"])}
    return Shape(dense=13, features=tuple(map(one_hot, rows)), rows=rows, logit_std=logit_std, **_figures(name))


def _mlperf() -> Shape:
    shape, lengths = _criteo("criteo-terabyte", 1.2), _published()["criteo-terabyte-multi-hot"]["ids_per_example"]
    features = [
        SynthFeature(feature=dataclasses.replace(synth.feature, max_length=length))
        for synth, length in zip(shape.features, lengths["C"], strict=True)
    ]
    sources = (*shape.sources, f"ids of an example: {lengths['source']}")
    return dataclasses.replace(shape, name="mlperf-dlrm-dcnv2", features=tuple(features), sources=sources)


_CALENDAR = (one_hot("hour_of_day", "hour"), one_hot("weekday", "weekday"))
_CALENDAR_ROWS = {"hour_of_day": 24, "weekday": 7}


def _named_rows(name: str) -> dict[str, int]:
    return {key: n for key, n in _published()[name]["rows"].items() if key != "source"}


def _avazu() -> Shape:
    rows = _named_rows("avazu")
    features = (*_CALENDAR, *map(one_hot, rows))
    return Shape(dense=0, features=features, rows={**_CALENDAR_ROWS, **rows}, logit_std=1.15, **_figures("avazu"))


def _taobao_intent() -> Shape:
    rows = {**_named_rows("taobao"), **_CALENDAR_ROWS}
    features = (one_hot("user_id"), one_hot("item_id"), one_hot("category_id", "parent", "item_id"), *_CALENDAR)
    shape = Shape(dense=0, features=features, rows=rows, logit_std=1.0, **_figures("taobao"))
    return dataclasses.replace(shape, name="taobao-intent")


def _taobao() -> Shape:
    def steps(name: str, table: str, origin: Origin, parent: str) -> SynthFeature:
        feature = CategoricalFeature(name=name, table=table, max_length=20)
        return SynthFeature(feature=feature, origin=origin, parent=parent)

    features = (
        one_hot("user_id"),
        one_hot("item_id"),
        one_hot("category_id", "parent", "item_id"),
        steps("item_history", "item_id", "history", "item_id"),
        steps("category_history", "category_id", "parent", "item_history"),
    )
    figures = _figures("taobao")
    sources = (figures["sources"][0], "click_rate: one negative a positive, as prepared", figures["sources"][2])
    return Shape(
        dense=0,
        features=features,
        rows=_named_rows("taobao"),
        logit_std=2.0,
        shares=(0.2, 0.1, 0.0, 0.7),
        matches=(("item_id", "item_history"), ("category_id", "category_history")),
        **figures | {"click_rate": 0.5, "sources": sources},
    )


def _rm(name: str, tables: int, gathers: int) -> Shape:
    names = [f"T{i + 1}" for i in range(tables)]
    features = tuple(
        SynthFeature(feature=CategoricalFeature(name=n, table=n, max_length=gathers, fixed_length=True)) for n in names
    )
    return Shape(
        name=name,
        dense=13,
        features=features,
        rows=dict.fromkeys(names, _ROWS_RM),
        click_rate=0.25,
        days=7,
        sources=(
            "tables and gathers: Tensor Casting, Table II",
            "rows and dense features: the paper names none; a million rows a table and Criteo's 13 counts",
        ),
    )


def _quickstart() -> Shape:
    rows = {f"C{i + 1}": n for i, n in enumerate((10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000))}
    return Shape(
        name="quickstart",
        dense=8,
        features=tuple(map(one_hot, rows)),
        rows=rows,
        click_rate=0.25,
        days=7,
        exponent=1.2,
        logit_std=2.0,
        head=50,
        shares=(0.7, 0.1, 0.2, 0.0),
        sources=("of no published log: small tables whose rows are seen often enough to be learned in a minute",),
    )


SHAPES: Mapping[str, Callable[[], Shape]] = {
    "criteo-kaggle": lambda: _criteo("criteo-kaggle", 1.3),
    "criteo-terabyte": lambda: _criteo("criteo-terabyte", 1.2),
    "mlperf-dlrm-dcnv2": _mlperf,
    "avazu": _avazu,
    "taobao": _taobao,
    "taobao-intent": _taobao_intent,
    "rm1": lambda: _rm("rm1", 10, 80),
    "rm2": lambda: _rm("rm2", 40, 80),
    "rm3": lambda: _rm("rm3", 10, 20),
    "rm4": lambda: _rm("rm4", 10, 20),
    "quickstart": _quickstart,
}


def shape_like(
    name: str, *, table_rows: int | None = None, scale: float | None = None, exponent: float | None = None
) -> Shape:
    """The named shape.

    Args:
      name: A key of ``SHAPES``.
      table_rows: For RM1 to RM4 the rows of every table, for the others a cap.
      scale: What every table's rows are multiplied by, rounded up; before ``table_rows``.
      exponent: The power law's exponent, in place of the shape's own.
    """
    if name not in SHAPES:
        raise DatasetError(f"there is no shape {name!r}; choose one of {', '.join(SHAPES)}")
    shape = SHAPES[name]()
    if scale is not None:
        if not 0 < scale <= 1:
            raise DatasetError(f"--scale is {scale:g}; choose one above 0 and up to 1, such as 1/64")
        shape = dataclasses.replace(shape, rows={table: math.ceil(rows * scale) for table, rows in shape.rows.items()})
    if table_rows is not None:
        if table_rows < 1:
            raise DatasetError(f"--table-rows is {table_rows}; a table needs at least one row")
        if name.startswith("rm"):
            shape = dataclasses.replace(shape, rows=dict.fromkeys(shape.rows, table_rows))
        shape = shape.capped(table_rows)
    if exponent is not None:
        if not 0 <= exponent <= 10:
            raise DatasetError(f"--exponent is {exponent}; choose one from 0 (uniform) to 10")
        shape = dataclasses.replace(shape, exponent=exponent)
    return shape
