"""Which of a label's two values is the positive one. For ``jrec.data.readers.guess``."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

_YES = {"ja", "oui", "si", "sí", "sim", "true", "yes", "y", "t", "1"}
_NO = {"nein", "non", "no", "não", "nao", "false", "n", "f", "0", "-1"}
# How words begin: clicked, purchases, bought.
_DONE = (
    "click|clk|tap|buy|bought|purchas|order|paid|conver|like|lov|good|positiv|success|accept|approv|subscri|instal"
    "|follow|shar|sav|watch|play|finish|complet|open|engag|interact|join|win|respond|repl|add|cart|book|deliver"
)
_POSITIVE = re.compile(_DONE)
_NEGATIVE = re.compile(
    rf"(no|not|non|none|never|without|\w+n't|bad|ham)$|(skip|dismiss|ignor|reject|refus|declin|den(y|ied)"
    rf"|fail|negativ|lost|lose|hide|hidden|bounce|abandon|nothing)|(no|not|non|un|dis|in)({_DONE})"
)
_WORD = re.compile(r"[^\W\d_]+(?:'t)?")


def positive_of(values: Sequence[str]) -> tuple[str, str, bool]:
    """Which of two values is positive, the other one, and whether words say so; without words the rarer is.

    Args:
      values: A column's values, two distinct ones among them.
    """
    counts = collections.Counter(values)
    rare = counts.most_common()[-1][0]
    high, low = sorted(counts, key=lambda value: (_rank(value), value == rare), reverse=True)
    return high, low, _rank(high) - _rank(low) == 2


def _rank(value: str) -> int:
    """1 of a text that says that something was done, -1 of one that says it was not, 0 of others."""
    text = value.strip().lower()
    if text in _YES or text in _NO:
        return 1 if text in _YES else -1
    found = _WORD.findall(text)
    if any(map(_NEGATIVE.match, found)):
        return -1
    return int(any(map(_POSITIVE.match, found)))
