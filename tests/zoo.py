"""Small logs with the columns and forms of public ones, and what a careful person makes of each column.

The files are made up: ``Log.write`` draws the values. A column's ``role`` is "label", "time:FORMAT", "dense", "cat",
"list:SEPARATOR" (categorical, of several values; without a separator as JSON or Parquet has them) or "out" (left out);
"a/b" where a careful person would take either. The guesser was written against ``FIRST``, not ``SECOND``.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import pathlib
import random
import zlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet

ROWS = 400
type Draw = Callable[[random.Random, int], str]


@dataclasses.dataclass(frozen=True)
class Log:
    """A log; ``columns`` are (name, values, role).

    ``form`` is "text", "parquet" or "libsvm". ``missing`` are texts that the guess has to take for missing values,
    ``lists`` columns that Parquet holds as lists, their elements between "|".
    """

    name: str
    columns: list[tuple[str, Draw, str]]
    delimiter: str = ","
    header: bool = True
    quoting: int = csv.QUOTE_MINIMAL
    form: str = "text"
    mark: bytes = b""
    missing: tuple[str, ...] = ()
    decimal: str = "."
    lists: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, str]:
        """What each column of the file is, by the name that a schema has for it."""
        named = {(name if self.header else f"c{k}"): role for k, (name, _, role) in enumerate(self.columns)}
        return {"label": "label", "features": "list: ", "values": "out/weights"} if self.form == "libsvm" else named

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes the file, the same one every time."""
        draw = random.Random(zlib.crc32(self.name.encode()))
        rows = [[value(draw, i) for _, value, _ in self.columns] for i in range(ROWS)]
        path = folder / self.name
        if self.form == "parquet":
            pyarrow.parquet.write_table(self._table(rows), path)
        elif self.form == "libsvm":
            path.write_text("".join(" ".join(row) + "\n" for row in rows))
        else:
            path.write_bytes(self.mark + self._text(rows).encode())
        return path

    def _text(self, rows: list[list[str]]) -> str:
        lines = [[name for name, _, _ in self.columns], *rows] if self.header else rows
        if len(self.delimiter) > 1:
            return "".join(self.delimiter.join(line) + "\n" for line in lines)
        file = io.StringIO()
        csv.writer(file, delimiter=self.delimiter, quoting=self.quoting, lineterminator="\n").writerows(lines)  # pyright: ignore[reportArgumentType]
        return file.getvalue()

    def _table(self, rows: list[list[str]]) -> pa.Table:
        columns = {}
        for (name, _, _), texts in zip(self.columns, zip(*rows, strict=True), strict=True):
            if name in self.lists:
                columns[name] = [text.split("|") if text else [] for text in texts]
            else:
                values = [None if text == "" else json.loads(text) if _is_json(text) else text for text in texts]
                columns[name] = values
        return pa.table(columns)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def row(start: int = 0) -> Draw:
    return lambda draw, i: str(start + i)


def one(*values: str) -> Draw:
    """One of some values, the first most often."""
    weights = [1 / (1 + k) for k in range(len(values))]
    return lambda draw, i: draw.choices(values, weights)[0]


def ids(count: int, form: str = "{}", start: int = 1) -> Draw:
    """Ids of ``count`` users or items, some of them much more frequent than others."""
    return lambda draw, i: form.format(start + int(count ** draw.random()) * 7919 % (9 * count))


def whole(low: int, high: int) -> Draw:
    return lambda draw, i: str(draw.randint(low, high))


def real(low: float, high: float, digits: int = 2) -> Draw:
    return lambda draw, i: f"{draw.uniform(low, high):.{digits}f}"


def near(middle: float, spread: float, digits: int = 0) -> Draw:
    return lambda draw, i: f"{draw.gauss(middle, spread):.{digits}f}"


def tail(middle: float, spread: float = 1.5, digits: int = 0) -> Draw:
    """Amounts and counts, whose largest are many times their median."""
    return lambda draw, i: f"{middle * draw.lognormvariate(0, spread):.{digits}f}"


def hexes(count: int, digits: int = 8) -> Draw:
    return lambda draw, i: (
        f"{zlib.crc32(str(int(count ** draw.random())).encode()) * 0x9E3779B97F4A7C15 % 16**digits:0{digits}x}"
    )


def blank(value: Draw, text: str = "", share: float = 0.15) -> Draw:
    """Values of which a share is missing."""
    return lambda draw, i: text if draw.random() < share else value(draw, i)


def comma(value: Draw) -> Draw:
    """Numbers with a decimal comma."""
    return lambda draw, i: value(draw, i).replace(".", ",")


def many(separator: str, *values: str, most: int = 4, least: int = 1, form: Callable[[str], str] = str) -> Draw:
    return lambda draw, i: form(separator.join(draw.sample(values, draw.randint(least, min(most, len(values))))))


def when(form: str, hours: float = 1.5, start: str = "2014-01-02T03:04:05") -> Draw:
    """Ascending times; ``form`` is a pattern of strftime, or "s", "ms" for numbers since 1970."""

    def value(draw: random.Random, i: int) -> str:
        at = datetime.datetime.fromisoformat(start).replace(tzinfo=datetime.UTC)
        at += datetime.timedelta(hours=hours * (i + draw.random()))
        if form in ("s", "ms"):
            return str(int(at.timestamp() * (1000 if form == "ms" else 1)))
        return at.strftime(form)

    return value


def title(words: int = 4) -> Draw:
    """Texts of which hardly two are the same."""
    parts = ("the", "lord", "of", "red", "river", "night", "a", "war", "story", "king", "lost", "sea", "blue", "moon")
    return lambda draw, i: (
        " ".join(draw.choice(parts) for _ in range(draw.randint(2, words))).title() + f" {draw.randrange(10**6)}"
    )


def name_of(count: int) -> Draw:
    """Names of products or films, with the punctuation that such names have."""
    parts = ("Heart", "Light", "Holder", "Box", "Set", "Retro", "Spot", "Bag", "Jumbo", "Candle", "Tin", "Cake")

    def value(draw: random.Random, i: int) -> str:
        own = random.Random(int(count ** draw.random()))
        return f'{own.choice(parts)} {own.choice(parts)}, "{own.choice(parts)}" ({1930 + own.randrange(80)})'

    return value


def constant(value: str) -> Draw:
    return lambda draw, i: value


def pairs(count: int, least: int, most: int, value: Draw) -> Draw:
    """The fields of a libsvm line behind its label."""

    def text(draw: random.Random, i: int) -> str:
        at = sorted(draw.sample(range(1, count), draw.randint(least, most)))
        return " ".join(f"{k}:{value(draw, i)}" for k in at)

    return text


GENRES = ("Drama", "Comedy", "Action", "Thriller", "Romance", "Adventure", "Sci-Fi", "Crime", "Horror", "Children's")
AIRPORTS = ("JFK", "LGA", "EWR", "BOS", "ORD", "ATL", "MIA", "SFO", "LAX", "SEA", "DEN", "IAH", "DFW", "PHX", "CLT")
COUNTRIES = ("United Kingdom", "France", "Germany", "EIRE", "United States", "Spain", "Netherlands", "Japan")
STATES = ("SC", "CA", "NY", "TX", "FL", "WA", "OR", "IL", "GA", "OH")
YES_NO = one("no", "yes")

# fmt: off
FIRST = [
    Log("vega_flights.csv", [
        ("", row(), "out"), ("date", when("%Y/%m/%d %H:%M"), "time:%Y/%m/%d %H:%M"), ("delay", near(5, 30), "dense"),
        ("distance", tail(600, 0.6), "dense"), ("origin", one(*AIRPORTS), "cat"),
        ("destination", one(*AIRPORTS), "cat"),
    ]),
    Log("nycflights13.csv", [
        ("year", constant("2013"), "out"), ("month", whole(1, 12), "cat/dense"), ("day", whole(1, 31), "cat/dense"),
        ("dep_time", blank(whole(500, 2359), "NA", 0.03), "dense"), ("sched_dep_time", whole(500, 2359), "dense"),
        ("dep_delay", blank(near(10, 30), "NA", 0.03), "dense"), ("arr_time", blank(whole(1, 2400), "NA"), "dense"),
        ("carrier", one("UA", "B6", "EV", "DL", "AA", "MQ"), "cat"), ("flight", ids(300), "cat"),
        ("tailnum", blank(ids(300, "N{}UA"), "NA", 0.02), "cat"), ("origin", one("EWR", "JFK", "LGA"), "cat"),
        ("dest", one(*AIRPORTS), "cat"), ("air_time", blank(near(150, 60), "NA"), "dense"),
        ("distance", tail(900, 0.5), "dense"), ("hour", whole(5, 23), "cat/dense"),
        ("minute", whole(0, 59), "cat/dense"), ("time_hour", when("%Y-%m-%d %H:00:00"), "time:iso"),
    ], missing=("NA",)),
    Log("u.data", [
        ("user", ids(300), "cat"), ("item", ids(400), "cat"), ("rating", one("4", "3", "5", "2", "1"), "label"),
        ("timestamp", when("s", 40), "time:seconds"),
    ], delimiter="\t", header=False),
    Log("movies.csv", [
        ("userId", ids(200), "cat"), ("movieId", ids(300), "cat"), ("title", name_of(200), "cat"),
        ("genres", many("|", *GENRES), "list:|"), ("rating", one("4.0", "3.5", "5.0", "2.5", "0.5", "3.0"), "label"),
        ("timestamp", when("s"), "time:seconds"),
    ], mark=b"\xef\xbb\xbf"),
    Log("space_genres.csv", [
        ("user", ids(200, "u{}"), "cat"), ("film", name_of(200), "cat"), ("genres", many(" ", *GENRES), "list: "),
        ("city", one("New York", "Los Angeles", "Chicago", "San Francisco", "New Orleans", "Boston"), "cat"),
        ("watched", one("True", "False"), "label"), ("ts", when("ms"), "time:milliseconds"),
    ]),
    Log("frappe.csv", [
        ("user", ids(150, start=0), "cat"), ("item", ids(300, start=0), "cat"), ("cnt", tail(2, 1.6), "dense"),
        ("daytime", one("morning", "evening", "night", "noon", "sunset"), "cat"),
        ("weekday", one("monday", "friday", "sunday"), "cat"), ("isweekend", one("workday", "weekend"), "cat"),
        ("homework", one("unknown", "home", "work"), "cat"), ("cost", one("free", "paid"), "cat"),
        ("weather", one("cloudy", "sunny", "unknown", "rainy"), "cat"), ("country", one(*COUNTRIES), "cat"),
        ("city", whole(0, 300), "cat"),
    ], delimiter="\t"),
    Log("adult.data", [
        ("age", whole(17, 90), "dense"), ("workclass", one("Private", "Self-emp-not-inc", "Local-gov", "?"), "cat"),
        ("fnlwgt", tail(180000, 0.5), "dense/out"),
        ("education", one("HS-grad", "Some-college", "Bachelors", "Masters"), "cat"),
        ("education-num", whole(1, 16), "dense/cat"),
        ("marital", one("Married-civ-spouse", "Never-married", "Divorced"), "cat"),
        ("occupation", one("Prof-specialty", "Craft-repair", "?", "Sales"), "cat"),
        ("relationship", one("Husband", "Own-child", "Wife"), "cat"), ("race", one("White", "Black", "Other"), "cat"),
        ("sex", one("Male", "Female"), "cat"), ("gain", blank(tail(5000), "0", 0.9), "dense"),
        ("loss", blank(tail(1800, 0.3), "0", 0.95), "dense"), ("hours", near(40, 12), "dense"),
        ("native", one("United-States", "?", "Mexico"), "cat"), ("income", one("<=50K", ">50K"), "label"),
    ], delimiter=", ", header=False, missing=("?",)),
    Log("titanic.csv", [
        ("PassengerId", row(1), "out"), ("Survived", one("0", "1"), "label"), ("Pclass", one("3", "1", "2"), "cat"),
        ("Name", title(), "out"), ("Sex", one("male", "female"), "cat"), ("Age", blank(near(30, 12, 1)), "dense"),
        ("SibSp", one("0", "1", "2", "3", "4", "8"), "dense/cat"), ("Parch", one("0", "1", "2", "5"), "dense/cat"),
        ("Ticket", ids(300, "A/5 {}"), "cat/out"), ("Fare", tail(14, 1, 4), "dense"),
        ("Cabin", blank(ids(100, "C{}"), "", 0.7), "cat"), ("Embarked", blank(one("S", "C", "Q"), "", 0.01), "cat"),
    ]),
    Log("online_retail.csv", [
        ("InvoiceNo", lambda draw, i: str(536365 + i // 4), "cat/out"), ("StockCode", ids(200, "{}A"), "cat"),
        ("Description", name_of(150), "cat"), ("Quantity", tail(3, 1.4), "dense"),
        ("InvoiceDate", when("%m/%d/%Y %H:%M", 3), "time:%m/%d/%Y %H:%M"), ("UnitPrice", tail(2, 1, 2), "dense"),
        ("CustomerID", blank(ids(150, "{}.0", 12000)), "cat"), ("Country", one(*COUNTRIES), "cat"),
    ]),
    Log("yellow_taxi.csv", [
        ("VendorID", one("2", "1"), "cat"), ("tpep_pickup_datetime", when("%Y-%m-%d %H:%M:%S"), "time:iso"),
        ("tpep_dropoff_datetime", when("%Y-%m-%d %H:%M:%S", 1.5, "2014-01-02T04:00:00"), "out"),
        ("passenger_count", one("1", "2", "5", "3", "6", "4"), "dense/cat"),
        ("trip_distance", tail(1.6, 0.9, 2), "dense"), ("RatecodeID", one("1", "2", "5", "3"), "cat"),
        ("store_and_fwd_flag", one("N", "Y"), "cat"), ("PULocationID", ids(100), "cat"),
        ("DOLocationID", ids(120), "cat"), ("payment_type", one("1", "2", "3"), "cat"),
        ("fare_amount", tail(9, 0.6, 1), "dense"), ("extra", one("0.0", "0.5", "1.0"), "dense"),
        ("mta_tax", one("0.5", "0"), "dense/cat"), ("tip_amount", tail(1.5, 0.9, 2), "dense"),
        ("improvement_surcharge", constant("0.3"), "out"), ("total_amount", tail(12, 0.6, 2), "dense"),
    ]),
    Log("avazu.csv", [
        ("id", lambda draw, i: str(draw.randrange(10**18, 10**19)), "out"), ("click", one("0", "1"), "label"),
        ("hour", when("%y%m%d%H"), "time:%y%m%d%H"), ("C1", one("1005", "1002", "1010"), "cat"),
        ("banner_pos", one("0", "1", "2"), "cat"), ("site_id", hexes(100), "cat"), ("site_domain", hexes(60), "cat"),
        ("site_category", hexes(9), "cat"), ("app_id", hexes(90), "cat"), ("device_id", hexes(300), "cat"),
        ("device_ip", hexes(900), "cat"), ("device_type", one("1", "0", "4"), "cat"),
        ("C14", ids(250, start=15000), "cat"), ("C15", one("320", "300", "216"), "cat"),
        ("C17", ids(60, start=1700), "cat"), ("C20", one("-1", "100084", "100148", "100111", "100077"), "cat"),
        ("C21", one("79", "23", "221", "48", "33"), "cat"),
    ]),
    Log("criteo.txt", [
        ("label", one("0", "1"), "label"), *((f"I{k}", blank(tail(5 * k, 2), "", 0.2), "dense") for k in range(1, 8)),
        *((f"C{k}", blank(hexes(30 * k), "", 0.05), "cat") for k in range(1, 8)),
    ], delimiter="\t", header=False),
    Log("bank-full.csv", [
        ("age", whole(18, 90), "dense"), ("job", one("management", "technician", "blue-collar", "unknown"), "cat"),
        ("marital", one("married", "single", "divorced"), "cat"),
        ("education", one("secondary", "tertiary", "primary"), "cat"), ("default", YES_NO, "cat"),
        ("balance", near(1300, 2000), "dense"), ("housing", YES_NO, "cat"), ("loan", YES_NO, "cat"),
        ("contact", one("cellular", "unknown", "telephone"), "cat"), ("day", whole(1, 31), "cat/dense"),
        ("month", one("may", "jul", "aug", "jun"), "cat"), ("duration", tail(180, 0.9), "dense"),
        ("campaign", tail(2, 0.8), "dense/cat"), ("pdays", blank(whole(1, 400), "-1", 0.8), "dense"),
        ("previous", blank(whole(1, 30), "0", 0.7), "dense"),
        ("poutcome", one("unknown", "failure", "success"), "cat"), ("y", YES_NO, "label"),
    ], delimiter=";", quoting=csv.QUOTE_NONNUMERIC),
    Log("frappe.libfm", [
        ("", one("-1", "1"), ""), ("", pairs(5000, 10, 10, constant("1")), ""),
    ], form="libsvm"),
    Log("air_quality.csv", [
        ("Date", when("%d/%m/%Y", 4), "time:%d/%m/%Y"), ("Time", when("%H.00.00"), "cat/out"),
        ("CO(GT)", comma(real(0.1, 8, 1)), "dense"), ("PT08.S1(CO)", near(1100, 200), "dense"),
        ("NMHC(GT)", near(150, 60), "dense"), ("C6H6(GT)", comma(tail(8, 0.8, 1)), "dense"),
        ("T", comma(near(18, 8, 1)), "dense"), ("RH", comma(near(49, 17, 1)), "dense"),
        ("AH", comma(near(1, 0.4, 4)), "dense"), ("Station", one("Nord", "Sud", "Est"), "cat"),
    ], delimiter=";", decimal=","),
    Log("hotel_bookings.csv", [
        ("hotel", one("City Hotel", "Resort Hotel"), "cat"), ("is_canceled", one("0", "1"), "label"),
        ("lead_time", tail(60, 1), "dense"), ("arrival_date_year", one("2016", "2017", "2015"), "cat/dense"),
        ("arrival_date_month", one("August", "July", "May"), "cat"),
        ("arrival_date_day_of_month", whole(1, 31), "cat/dense"), ("adults", one("2", "1", "3", "0"), "dense/cat"),
        ("meal", one("BB", "HB", "SC", "FB"), "cat"),
        ("country", blank(one("PRT", "GBR", "FRA", "ESP"), "NULL", 0.02), "cat"),
        ("is_repeated_guest", one("0", "1"), "cat"),
        ("previous_cancellations", blank(whole(1, 26), "0", 0.9), "dense/cat"),
        ("agent", blank(ids(100), "NULL"), "cat"), ("company", blank(ids(60), "NULL", 0.9), "cat"),
        ("adr", near(100, 40, 2), "dense"), ("customer_type", one("Transient", "Contract", "Group"), "cat"),
        ("reservation_status_date", when("%Y-%m-%d", 4), "time:iso"),
    ], missing=("NULL",)),
    Log("reviews.parquet", [
        ("reviewerID", ids(250, "A{}XQ"), "cat"), ("asin", ids(200, "B00{}"), "cat"),
        ("overall", one("5", "4", "3", "1", "2"), "label"), ("verified", one("true", "false"), "cat"),
        ("unixReviewTime", when("s"), "time:seconds"), ("summary", title(), "out"),
        ("categories", many("|", "Toys", "Games", "Baby", "Home"), "list:"),
        ("vote", blank(tail(3, 1.4), "", 0.6), "dense"),
    ], form="parquet", lists=("categories",)),
    Log("tmdb.csv", [
        ("id", row(1), "out"), ("original_language", one("en", "fr", "hi"), "cat"),
        ("budget", tail(10**7, 2), "dense"),
        ("genres", many('", "', *GENRES, form=lambda text: f'["{text}"]'), "list:"),
        ("popularity", tail(3, 1.2, 6), "dense"),
        ("release_date", when("%Y-%m-%d", 200, "1980-01-01T00:00:00"), "time:iso"),
        ("runtime", near(100, 20), "dense"),
        ("tags", many("', '", "war", "love", "space", form=lambda text: f"['{text}']"), "list:"),
        ("status", one("Released", "Rumored"), "cat"), ("vote_average", near(6, 1, 1), "dense"),
        ("adult", one("False", "True"), "cat"),
    ]),
]

SECOND = [
    Log("seattle_weather.csv", [
        ("date", when("%Y/%m/%d", 24), "time:%Y/%m/%d"), ("precipitation", blank(tail(4, 1, 1), "0.0", 0.5), "dense"),
        ("temp_max", near(16, 7, 1), "dense"), ("temp_min", near(8, 5, 1), "dense"), ("wind", near(3, 1, 1), "dense"),
        ("weather", one("rain", "sun", "fog", "snow"), "cat"),
    ]),
    Log("nyc_weather.csv", [
        ("", row(1), "out"), ("origin", one("EWR", "JFK", "LGA"), "cat"), ("year", constant("2013"), "out"),
        ("month", whole(1, 12), "cat/dense"), ("day", whole(1, 31), "cat/dense"), ("hour", whole(0, 23), "cat/dense"),
        ("temp", near(55, 17, 2), "dense"), ("dewp", near(41, 19, 2), "dense"), ("humid", near(62, 19, 2), "dense"),
        ("wind_dir", blank(lambda draw, i: str(10 * draw.randint(0, 36)), "NA", 0.03), "dense/cat"),
        ("wind_speed", blank(one("10.35702", "8.05546", "13.80936", "5.7539", "0.0"), "NA", 0.01), "dense"),
        ("wind_gust", blank(one("20.71404", "23.0156", "25.31716", "18.41248"), "NA", 0.7), "dense"),
        ("precip", blank(real(0, 1, 2), "0", 0.9), "dense"), ("pressure", blank(near(1017, 7, 1), "NA"), "dense"),
        ("visib", one("10", "9", "7", "0.25", "3"), "dense"), ("time_hour", when("%Y-%m-%dT%H:00:00Z"), "time:iso"),
    ], missing=("NA",)),
    Log("book_crossing.csv", [
        ("User-ID", ids(200, start=276000), "cat"), ("ISBN", ids(300, "034545{:04d}"), "cat"),
        ("Book-Rating", one("0", "8", "10", "7", "5", "9"), "label"),
    ], delimiter=";", quoting=csv.QUOTE_ALL),
    Log("kuairec.csv", [
        ("user_id", ids(200, start=0), "cat"), ("video_id", ids(300, start=0), "cat"),
        ("play_duration", tail(8000, 0.8), "dense"), ("video_duration", tail(9000, 0.5), "dense"),
        ("time", when("%Y-%m-%d %H:%M:%S.%f"), "time:iso"), ("date", when("%Y%m%d"), "out"),
        ("timestamp", when("s"), "out"), ("watch_ratio", tail(0.8, 0.7, 6), "dense"),
    ]),
    Log("steam-200k.csv", [
        ("user", ids(150, start=151603712), "cat"), ("game", name_of(100), "cat"),
        ("behavior", one("purchase", "play"), "label/cat"), ("hours", blank(tail(8, 1.5, 1), "1.0", 0.6), "dense"),
        ("none", constant("0"), "out"),
    ], header=False),
    Log("telco_churn.csv", [
        ("customerID", lambda draw, i: f"{draw.randrange(10**4):04d}-{hexes(10**9, 5)(draw, i).upper()}", "out/cat"),
        ("gender", one("Male", "Female"), "cat"), ("SeniorCitizen", one("0", "1"), "cat"),
        ("Partner", one("No", "Yes"), "cat"), ("tenure", whole(0, 72), "dense"),
        ("InternetService", one("Fiber optic", "DSL", "No"), "cat"),
        ("Contract", one("Month-to-month", "Two year", "One year"), "cat"),
        ("PaymentMethod", one("Electronic check", "Mailed check", "Bank transfer (automatic)"), "cat"),
        ("MonthlyCharges", real(18, 118, 2), "dense"), ("TotalCharges", blank(tail(1400, 1, 2), " ", 0.02), "dense"),
        ("Churn", one("No", "Yes"), "label"),
    ]),
    Log("outbrain.csv", [
        ("display_id", row(1), "out/cat"), ("ad_id", ids(200), "cat"), ("clicked", one("0", "1"), "label"),
        ("uuid", hexes(300, 14), "cat"), ("document_id", ids(200, start=1000), "cat"),
        ("timestamp", when("ms"), "time:milliseconds"), ("platform", one("2", "1", "3"), "cat"),
        ("geo_location", lambda draw, i: f"US>{draw.choice(STATES)}>{draw.randint(500, 560)}", "cat"),
    ]),
    Log("retailrocket.csv", [
        ("timestamp", when("ms"), "time:milliseconds"), ("visitorid", ids(300, start=250000), "cat"),
        ("event", one("view", "addtocart", "transaction"), "cat/label"), ("itemid", ids(300, start=350000), "cat"),
        ("transactionid", blank(ids(100, "{}.0"), "", 0.9), "cat/out"),
    ]),
    Log("yoochoose.dat", [
        ("session", lambda draw, i: str(i // 3 + 1), "cat"), ("at", when("%Y-%m-%dT%H:%M:%S.%fZ"), "time:iso"),
        ("item", ids(300, start=214536500), "cat"), ("category", one("0", "S", "1", "2", "5"), "cat"),
    ], header=False),
    Log("tenrec.csv", [
        ("user_id", ids(200), "cat"), ("item_id", ids(300), "cat"), ("click", one("0", "1"), "label"),
        ("follow", one("0", "1"), "cat/out"), ("like", one("0", "1"), "cat/out"),
        ("video_category", one("0", "1", "2"), "cat"), ("watching_times", blank(whole(1, 30), "0", 0.6), "dense"),
        ("gender", one("1", "2", "0"), "cat"), ("age", one("0", "3", "2", "4", "5", "1"), "cat/dense"),
        ("hist_1", ids(300), "cat"), ("hist_2", ids(300), "cat"),
    ], mark=b"\xef\xbb\xbf"),
    Log("diamonds.csv", [
        ("", row(1), "out"), ("carat", tail(0.7, 0.5, 2), "dense"),
        ("cut", one("Ideal", "Premium", "Very Good", "Fair"), "cat"), ("color", one(*"GEFHDIJ"), "cat"),
        ("clarity", one("SI1", "VS2", "SI2", "IF"), "cat"), ("depth", near(61, 1, 1), "dense"),
        ("table", near(57, 2), "dense"), ("price", tail(2400, 1), "dense"), ("x", near(5.7, 1, 2), "dense"),
        ("y", near(5.7, 1, 2), "dense"),
    ], quoting=csv.QUOTE_NONNUMERIC),
    Log("a9a.svm", [
        ("", one("-1", "+1"), ""), ("", pairs(123, 8, 15, real(0, 1, 4)), ""),
    ], form="libsvm"),
    Log("bike_hour.csv", [
        ("instant", row(1), "out"), ("dteday", when("%Y-%m-%d"), "time:iso"),
        ("season", one("1", "2", "3", "4"), "cat"), ("yr", one("0", "1"), "cat"), ("mnth", whole(1, 12), "cat/dense"),
        ("hr", whole(0, 23), "cat/dense"), ("holiday", one("0", "1"), "cat"), ("weekday", whole(0, 6), "cat"),
        ("workingday", one("1", "0"), "cat"), ("weathersit", one("1", "2", "3"), "cat"),
        ("temp", real(0, 1, 2), "dense"), ("hum", real(0, 1, 2), "dense"),
        ("windspeed", one("0.0", "0.1343", "0.1642", "0.194", "0.2239"), "dense"), ("casual", tail(17, 1.2), "dense"),
        ("cnt", tail(140, 1), "dense"),
    ]),
    Log("online_shoppers.csv", [
        ("Administrative", one("0", "1", "2", "3", "4", "5", "7", "12"), "dense/cat"),
        ("Administrative_Duration", blank(tail(80, 1, 2), "0.0", 0.4), "dense"),
        ("ProductRelated", tail(18, 1.1), "dense"), ("BounceRates", real(0, 0.2, 6), "dense"),
        ("PageValues", blank(tail(15, 1, 6), "0.0", 0.7), "dense"),
        ("SpecialDay", one("0.0", "0.6", "0.8", "0.4"), "dense"), ("Month", one("May", "Nov", "Mar", "Dec"), "cat"),
        ("OperatingSystems", one("2", "1", "3", "4"), "cat"), ("Browser", one("2", "1", "4", "5", "13"), "cat"),
        ("Region", whole(1, 9), "cat"), ("TrafficType", whole(1, 20), "cat"),
        ("VisitorType", one("Returning_Visitor", "New_Visitor", "Other"), "cat"),
        ("Weekend", one("FALSE", "TRUE"), "cat"), ("Revenue", one("FALSE", "TRUE"), "label"),
    ]),
    Log("goodreads.parquet", [
        ("user_id", hexes(200, 32), "cat"), ("book_id", ids(200, start=18000), "cat"),
        ("is_read", one("true", "false"), "cat/label"), ("rating", one("0", "4", "5", "3"), "label/cat"),
        ("date_added", when("%d-%b-%Y"), "time:%d-%b-%Y"), ("n_votes", blank(whole(1, 90), "0", 0.6), "dense"),
        ("shelves", many("|", "to-read", "fantasy", "own", "ya"), "list:"),
        ("pages", blank(near(300, 90), "", 0.1), "dense"),
    ], form="parquet", lists=("shelves",)),
    Log("on_time.csv", [
        ("FL_DATE", when("%m/%d/%Y 12:00:00 AM"), "time:%m/%d/%Y %I:%M:%S %p"),
        ("OP_CARRIER", one("WN", "DL", "AA"), "cat"), ("OP_CARRIER_FL_NUM", ids(300), "cat"),
        ("ORIGIN", one(*AIRPORTS), "cat"), ("DEST", one(*AIRPORTS), "cat"),
        ("CRS_DEP_TIME", whole(500, 2359), "dense"), ("DEP_DELAY", blank(near(9, 30, 2)), "dense"),
        ("CANCELLED", one("0.00", "1.00"), "cat/dense"), ("DISTANCE", near(800, 200, 2), "dense"),
        ("ARR_DEL15", one("0.00", "1.00"), "label"),
    ]),
    Log("kunden.csv", [
        ("Kundennummer", ids(200, start=10000), "cat"), ("Datum", when("%d.%m.%Y %H:%M"), "time:%d.%m.%Y %H:%M"),
        ("Betrag", comma(tail(40, 1, 2)), "dense"), ("Filiale", one("Köln", "München", "Bad Homburg"), "cat"),
        ("Rabatt", comma(one("0.0", "0.05", "0.1")), "dense"),
        ("Bemerkung", blank(one("Umtausch", "Eilt"), "-", 0.6), "cat"), ("Storniert", one("nein", "ja"), "label"),
    ], delimiter=";", decimal=","),
    Log("mind.tsv", [
        ("impression", row(1), "out"), ("user", ids(200, "U{}"), "cat"),
        ("at", when("%m/%d/%Y %I:%M:%S %p"), "time:%m/%d/%Y %I:%M:%S %p"),
        ("history", many(" ", *(f"N{k}" for k in range(3000, 3060)), most=12), "list: "),
        ("news", ids(100, "N{}"), "cat"), ("clicked", one("0", "1"), "label"),
    ], delimiter="\t", header=False),
    Log("anime.csv", [
        ("user_id", ids(200), "cat"), ("anime_id", ids(300), "cat"), ("name", name_of(200), "cat"),
        ("genre", many(", ", *GENRES), "list:, "), ("type", one("TV", "OVA", "Movie"), "cat"),
        ("episodes", blank(tail(12, 1), "Unknown", 0.05), "dense"), ("members", tail(20000, 1.5), "dense"),
        ("rating", one("-1", "8", "7", "9", "10", "6"), "label"),
    ], missing=("Unknown",)),
    Log("six_nulls.csv", [
        ("key", ids(200, "k{}"), "cat"), ("a", blank(near(5, 2, 2)), "dense"),
        ("b", blank(near(5, 2, 2), "NaN"), "dense"), ("c", blank(near(5, 2, 2), "NULL"), "dense"),
        ("d", blank(near(5, 2, 2), "\\N"), "dense"), ("e", blank(near(5, 2, 2), "None"), "dense"),
        ("f", blank(near(5, 2, 2), "N/A"), "dense"), ("bought", one("0", "1"), "label"),
    ], missing=("NaN", "NULL", "\\N", "None", "N/A")),
]
# fmt: on
