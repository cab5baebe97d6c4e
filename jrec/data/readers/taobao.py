"""Taobao UserBehavior: ``user,item,category,behaviour,timestamp`` without a header, in any order."""

from __future__ import annotations

import numpy as np

from jrec.data.readers.keys import integer_keys, text_key
from jrec.data.readers.parse import Dialect, Field, ParsedBlock
from jrec.data.readers.source import Chunk, Source, calendar_keys, one_hot, reject_ids

IDS = ("user_id", "item_id", "category_id")
VIEW = "pv"
INTENT = ("buy", "cart", "fav")
CHINA_SECONDS = 8 * 3600  # the log's users live in UTC+8, without daylight saving


class Taobao(Source):
    """One example an event: the label is 1 for a purchase intent (buy, cart, fav) and 0 for a page view (pv).

    Features are user, item, category, and the hour of day and weekday in China. Events are sorted by time; within
    one second they keep the order of the files.
    """

    name = "taobao"
    categorical = one_hot(*IDS, "hour_of_day", "weekday")
    timed = True

    def dialect(self, path: str) -> Dialect:
        """The same for every file."""
        return Dialect(
            fields=(
                *(Field(name=n, kind="integer", blank=False) for n in IDS),
                Field(name="behaviour", kind="text", blank=False),
                Field(name="timestamp", kind="integer", blank=False),
            ),
            hint=" (user, item, category, behaviour, timestamp)",
        )

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Labels, keys, and times in unix seconds."""
        self.check(parsed)
        times = parsed.numbers("timestamp")
        return Chunk(
            labels=(parsed.numbers("behaviour") != np.uint64(text_key(VIEW))).astype(np.float32),
            dense={},
            keys={**{n: integer_keys(parsed.numbers(n)) for n in IDS}, **calendar_keys(times + CHINA_SECONDS)},
            times=times,
        )

    @staticmethod
    def check(parsed: ParsedBlock) -> None:
        """Rejects rows with an unknown behaviour, a time before 1970, or ids that are none."""
        reject_ids(parsed, *IDS)
        known = np.isin(parsed.numbers("behaviour"), np.array([np.uint64(text_key(b)) for b in (VIEW, *INTENT)]))
        parsed.reject(~known, "behaviour", "is none of pv, buy, cart, fav")
        parsed.reject(parsed.numbers("timestamp") < 0, "timestamp", "is before 1970")
