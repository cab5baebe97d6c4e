"""What the sampled values of one column look like: numbers, times, lists, ids. For ``jrec.prepare.readers.guess``."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import re
import statistics

_FEW = 20  # distinct whole numbers that are taken for categories
_MANY = 100  # values from which on it says something that all are distinct
_TAIL = 20  # how many times the median the largest value of a long tail is
_SPARSE, _REPEATED = 5, 0.8  # ids: a range of 5 numbers for each distinct one, and yet one in five a repetition
_UNEVEN = 3  # ids: neighbours differ in frequency by so many times what chance explains
_SEPARATORS = ("|", ";", ", ", ",", " ")
_SURE_MISSING = ("NaN", "nan", "NAN", "N/A", "n/a", "NULL", "null", "\\N", "?", "<NA>", "#N/A")
_MISSING = (*_SURE_MISSING, "NA", "None", "none", "-")
_WORDS = ({"true", "false"}, {"t", "f"}, {"yes", "no"}, {"y", "n"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")
_AMOUNT = re.compile(
    r"[+-]?([$€£¥₹] ?|(USD|EUR|GBP) )?[+-]?((\d{1,3}(,\d{3})+|\d+)(\.\d+)?|(\d{1,3}(\.\d{3})+|\d+)(,\d+)?)"
    r"( ?([%$€£¥₹]|USD|EUR|GBP))?"
)
_INDEX = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words(text: str) -> tuple[str, ...]:
    """The words of a text, which is shorter to write than a tuple."""
    return tuple(text.split())


_GLUED = re.compile(r"(user|item|visitor|movie|customer|client|transaction|product|session|order|account|video|page)id$"
                    r"|nummer$|nr$")  # fmt: skip
_IDS = words(
    "id ids key code no nr num number zip zipcode postcode user item movie song artist track video book product"
    " ad campaign advertiser site app device brand shop store seller category cate page query city country region"
    " author flight session visitor customer client account member invoice order transaction ticket stock sku isbn"
    " asin agent company zone location district channel platform browser systems system type class pclass status"
    " group segment cluster section department dept aisle carrier airline airport origin dest destination station"
    " route model language currency gender sex race genre tag keyword publisher pos slot weekday flag hash county"
    " state operator host domain species season holiday workingday weathersit grade tier month mnth day hour hr"
    " minute week quarter"
)
_MEASURES = words(
    "age price prices amount amt fare cost costs fee tax tip tolls total sum avg average mean median min max std"
    " count cnt counts quantity qty distance dist duration delay length len width height weight size depth speed"
    " windspeed temp temperature humidity hum humid pressure precip precipitation rate rates ratio pct percent"
    " percentage share score rating vote time runtime lat latitude lon lng longitude income salary balance gain"
    " loss budget revenue sales profit views votes likes impressions hours minutes seconds mins secs days years"
    " times value values population points mileage mpg horsepower pages year charges tenure volume area extra"
    " discount visib wind dew dewp gust number n num x y z"
)


@dataclasses.dataclass
class Column:
    """A column's sampled values, and what is seen in them.

    Attributes:
      name: The column's name in the file.
      values: Texts that are not missing.
      blanks: Whether some are missing.
      missing: Texts that stand for a missing value.
      lists: Whether the file itself has lists; ``values`` are their elements.
      hint: RecBole's type of the column; "" elsewhere.
      comma: Whether numbers have a decimal comma.
      named: Whether the file has a header, so that the name says something.
      odd: The text that one in many numbers is, and that is therefore taken for a missing one; "" if there is none.
    """

    name: str
    values: list[str]
    blanks: bool
    missing: tuple[str, ...] = ()
    lists: bool = False
    hint: str = ""
    comma: bool = False
    named: bool = True
    odd: str = ""

    def __post_init__(self) -> None:
        self.plain = self.name.rsplit(":", 1)[0] if self.hint else self.name
        self.comma = self.comma and all(_DECIMAL_COMMA.fullmatch(v) for v in self.values)
        form = _DECIMAL_COMMA if self.comma else _NUMBER
        named = [v for v in self.values if form.fullmatch(v)]
        candidates = {v for v in self.values if not form.fullmatch(v)} if named else set()
        if candidates and not candidates <= {*_MISSING, " "} and len(candidates) == 1 and len(set(named)) > _FEW:
            self.odd = next(iter(candidates)) if len(named) >= 0.5 * len(self.values) else ""
        if not (candidates and (self.odd or candidates <= {*_MISSING, " "})):
            candidates = set(self.values) & {*_SURE_MISSING, " "}
        if candidates and not self.lists:
            self.missing = tuple(sorted(candidates))
            self.values, self.blanks = [v for v in self.values if v not in candidates], True
        self.distinct = set(self.values)
        self.numeric = bool(self.values) and all(map(form.fullmatch, self.values)) and not self.lists
        self.numbers = [float(v.replace(",", ".") if self.comma else v) for v in self.values] if self.numeric else []
        self.whole = self.numeric and all(n.is_integer() for n in self.numbers)
        self.words = [word.lower() for word in _WORD.findall(self.plain)] if self.named else []

    @property
    def two(self) -> bool:
        """Whether it has two values, as a label has."""
        return len(self.distinct) == 2 and not self.lists

    @property
    def is_label(self) -> bool:
        """Whether its values are those that a label may have without more said."""
        if self.numeric:
            return set(self.numbers) in ({0.0, 1.0}, {-1.0, 1.0}) and not self.comma
        return any({v.lower() for v in self.distinct} == words for words in _WORDS)

    @property
    def few(self) -> bool:
        """Whether it has few distinct values."""
        return len(self.distinct) <= min(_FEW, len(self.values) / 2)

    @property
    def unique(self) -> bool:
        """Whether all values are distinct, and there are enough of them for this to say something."""
        return len(self.distinct) == len(self.values) >= _MANY

    @property
    def many_distinct(self) -> bool:
        """Whether hardly two values are the same."""
        return len(self.distinct) >= 0.9 * len(self.values) >= 0.9 * _MANY

    @property
    def free_text(self) -> bool:
        """Whether it holds texts of several words, of which hardly two are the same."""
        spaced = sum(" " in value for value in self.values) >= 0.5 * len(self.values)
        return not self.numeric and self.many_distinct and spaced and self.separator is None

    @property
    def rows(self) -> bool:
        """Whether it numbers the lines."""
        steps = {b - a for a, b in zip(self.numbers, self.numbers[1:], strict=False)}
        called = self.unnamed or self.called_id or self.plain.lower() in ("index", "seqno", "instant")
        enough = self.whole and not self.blanks and len(self.numbers) >= _FEW
        return enough and (steps == {1.0} or (called and min(steps) > 0))

    @property
    def unnamed(self) -> bool:
        """Whether it has no name but one that pandas makes up for an index."""
        return _INDEX.fullmatch(self.name) is not None

    @property
    def tailed(self) -> bool:
        """Whether its largest numbers are many times the median, as in counts and amounts."""
        return min(self.numbers) >= 0 and max(self.numbers) > _TAIL * max(statistics.median(self.numbers), 1)

    @functools.cached_property
    def amount(self) -> str:
        """One of its values if all are amounts as "$1,234.50", "12 %" or "1,045"; "" otherwise."""
        if self.numeric or self.lists or self.hint or not all(map(_AMOUNT.fullmatch, self.distinct)):
            return ""
        marked = [v for v in self.values if not re.fullmatch(r"[+-]?[\d.,]*", v)]
        thousands = [v for v in self.values if re.search(r"[,.]0\d\d", v)]  # no number of a list begins with 0
        return next(iter(marked or thousands), "")

    @functools.cached_property
    def separator(self) -> str | None:
        """What separates the elements of lists, "" of lists as JSON has them; None if it has none."""
        if self.hint.endswith("_seq"):
            return " "
        if self.numeric or self.lists or self.hint or not self.values or self.amount:
            return None
        if all(v[0] == "[" and v[-1] == "]" for v in self.values):
            return ""
        return next((mark for mark in _SEPARATORS if self._splits(mark)), None)

    def _splits(self, mark: str) -> bool:
        """Whether values are lists: pieces combine freely, so that they are much fewer than the values."""
        lists = [value.split(mark) for value in self.values]
        if sum(len(pieces) > 1 for pieces in lists) < 0.2 * len(lists):
            return False
        if any(p != p.strip() or not p for pieces in lists for p in pieces) or len({len(p) for p in lists}) < 2:
            return False
        combined: collections.Counter[str] = collections.Counter()
        for value in self.distinct:
            combined.update(set(value.split(mark)))
        free = sum(count > 1 for count in combined.values()) >= 0.6 * len(combined)
        return free and (len(combined) <= 0.5 * len(self.distinct) or (mark == " " and _numbered(combined)))

    @property
    def called_id(self) -> bool:
        """Whether it is called as ids and categories are."""
        return self.words[-1:] != [] and (
            self.words[-1] in _IDS or "id" in self.words or _GLUED.search(self.plain.lower()) is not None
        )

    def measured(self) -> tuple[bool, str]:
        """Whether its numbers are measures, not ids or categories, and what makes that doubtful, "" if nothing does."""
        if self.hint:
            return self.hint == "float", ""
        last, first = (self.words[-1], self.words[0]) if self.words else ("", "")
        if first in ("num", "number", "n", "total", "avg", "mean") and len(self.words) > 1:
            return True, ""
        if self.whole and {"year", "yr"}.intersection(self.words) and all(1800 <= n <= 2100 for n in self.numbers):
            return True, "are its years numbers, or categories? As [[categorical]] each has a row of its own"
        if self.called_id:
            return not self.whole, "" if self.whole else "it is called as ids are, but has fractions"
        if not self.whole or min(self.numbers) < -1 or last in _MEASURES or set(_MEASURES).intersection(self.words):
            return not (self.whole and self.two and set(self.numbers) == {0.0, 1.0}), ""
        if self.two:
            return False, ""
        if self.few:
            return False, f"its {len(self.distinct)} distinct numbers may as well be a count or a measure"
        if self.numbers == sorted(self.numbers) and len(self.distinct) < len(self.numbers):
            return False, "its numbers ascend and repeat, as those of groups of lines do"
        if self._scattered:
            return False, "its numbers repeat as those of ids do, but its name does not say so"
        return True, "" if self.tailed else "its name does not say whether its numbers are measures or ids"

    @functools.cached_property
    def _scattered(self) -> bool:
        """Whether numbers that lie far apart repeat, or neighbours differ in frequency, as of ids, not of measures."""
        counts = collections.Counter(self.numbers)
        usual, times = counts.most_common(1)[0]
        if times > 0.3 * len(self.numbers):  # such as the zeros of an amount
            del counts[usual]
        ordered = sorted(counts.elements())
        inner = ordered[len(ordered) // 10 : len(ordered) - len(ordered) // 10]
        if len(inner) < _FEW:
            return False
        own = [(n, counts[n]) for n in sorted(set(inner))]
        if own[len(own) // 2][0] - inner[0] < 0.25 * (inner[-1] - inner[0]):  # spread as amounts are, not evenly
            return False
        step = math.gcd(*(int(n) for n, _ in own)) or 1
        width = (inner[-1] - inner[0]) / step + 1
        if width > _SPARSE * len(own) and len(own) < _REPEATED * len(inner):
            return True
        if sum(n % 5 == 0 for n in inner) > 0.5 * len(inner):  # rounded measures
            return False
        times = [count for _, count in own]
        bends = [
            (2 * b - a - c) ** 2 - _UNEVEN * (4 * b + a + c)
            for a, b, c in zip(times, times[1:], times[2:], strict=False)
        ]
        return sum(bends) > 0


def _numbered(pieces: collections.Counter[str]) -> bool:
    """Whether the pieces of texts are ids, such as "17" and "N1042"."""
    return all(re.fullmatch(r"\D{0,3}\d+", piece) for piece in pieces)


def decimal_comma(columns: list[list[str]], delimiter: str) -> bool:
    """Whether a file writes numbers with a decimal comma: some column has only such, none has points."""
    if delimiter == ",":
        return False
    filled = [[v for v in values if v and v not in _MISSING] for values in columns]
    commas = any(v and all(map(_DECIMAL_COMMA.fullmatch, v)) and any("," in x for x in v) for v in filled)
    return commas and not any(v and all(map(_NUMBER.fullmatch, v)) and any("." in x for x in v) for v in filled)


def is_number(text: str) -> bool:
    """Whether a text is a number with a decimal point."""
    return _NUMBER.fullmatch(text) is not None


def toml(value: str | list[str]) -> str:
    """A text, or texts, as TOML has them."""
    return json.dumps(value, ensure_ascii=False)


def ask(column: Column, question: str) -> str:
    """A question about a column, as the schema's comments have them; "" if there is none."""
    return f"\n# ? {toml(column.name)}: {question}" if question else ""
