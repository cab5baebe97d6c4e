"""Avazu's click-through challenge: train.csv with a header, all features categorical, time in the field ``hour``."""

from __future__ import annotations

import numpy as np

from jrec.data.schema import DatasetError
from jrec.prepare.readers.lines import first_line
from jrec.prepare.readers.log_format import (
    Chunk,
    LogFormat,
    calendar_keys,
    labels_of,
    one_hot,
    reject_labels,
    texts_by_feature,
)
from jrec.prepare.readers.parse import Dialect, Field, ParsedBlock

CATEGORICALS = (
    "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id",
    "device_ip", "device_model", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)),
)  # fmt: skip
_KINDS = {"id": "skip", "click": "number", "hour": "integer"}


class Avazu(LogFormat):
    """21 categoricals, and the hour of day and weekday of ``hour`` (YYMMDDHH); ``id`` is left out; nothing is dense."""

    name = "avazu"
    categorical = one_hot("hour_of_day", "weekday", *CATEGORICALS)
    timed = True
    label = "click"

    def dialect(self, path: str) -> Dialect:
        """Follows the header's order of columns."""
        names = first_line(path).decode("utf-8", errors="replace").split(",")
        expected = {*_KINDS, *CATEGORICALS}
        kinds = {**_KINDS, "click": "skip"} if self.labels == "none" else _KINDS
        if lacking := sorted(expected - set(names) - ({"click"} if self.labels != "required" else set())):
            hint = " (the challenge's test file has no clicks and needs --no-labels)" if lacking == ["click"] else ""
            raise DatasetError(f"{path}:1: the header lacks {', '.join(lacking)}; Avazu's train.csv has them{hint}")
        if odd := sorted(set(names) - expected) or sorted({n for n in names if names.count(n) > 1}):
            raise DatasetError(f"{path}:1: the header has unexpected or repeated columns: {', '.join(odd)}")
        fields = (Field(name=n, kind=kinds.get(n, "text"), blank=n not in ("click", "hour")) for n in names)  # pyright: ignore[reportArgumentType]
        return Dialect(fields=tuple(fields), skip_lines=1)

    def raw_fields(self) -> tuple[Field, ...]:
        """The hour, and 21 categoricals."""
        return (Field(name="hour", kind="integer", blank=False), *(Field(name=n, kind="text") for n in CATEGORICALS))

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Labels, keys, and times in seconds."""
        reject_labels(parsed, "click")
        parsed.reject(_seconds(parsed.numbers("hour"))[1], "hour", "is not an hour as YYMMDDHH")
        seconds, _ = _seconds(parsed.numbers("hour"))
        return Chunk(
            labels=labels_of(parsed, "click"),
            dense={},
            keys={**calendar_keys(seconds), **{n: parsed.columns[n] for n in CATEGORICALS}},
            times=seconds,
            texts=texts_by_feature(parsed, {n: n for n in CATEGORICALS}),
        )


def _seconds(hours: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds since 1970 of (n,) int64 YYMMDDHH, and where there is no such hour."""
    year, month, day, hour = hours // 1_000_000, hours // 10_000 % 100, hours // 100 % 100, hours % 100
    wrong = (hours < 0) | (year > 99) | (month < 1) | (month > 12) | (day < 1) | (hour > 23)
    months = np.where(wrong, 0, (30 + year) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1).astype("timedelta64[D]")
    # The 30th of February is in March, and so in another month.
    wrong |= days >= (months + np.timedelta64(1, "M")).astype("datetime64[D]")
    return days.astype(np.int64) * 86400 + hour * 3600, wrong
