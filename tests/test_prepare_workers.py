"""Preparation by workers that share the file system and may die: the dataset is that of one process, to the byte."""

import concurrent.futures
import gzip
import pickle
import random

import pytest
from test_prepare_workspace import files, write_log

from jrec.data.schema import DatasetError
from jrec.prepare import parts
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Criteo, Delimited, MovieLens, MovieLensOptions, load_schema

HEADER = "y,at,x,c,l,w,n\n"
SCHEMA = """
label.column = "y"
time.column = "at"
[[dense]]
column = "x"
transform = "standardize"
[[categorical]]
column = "c"
[[categorical]]
column = "l"
separator = "|"
weights = "w"
[[categorical]]
column = "n"
quantiles = 4
"""


class LostWorkers(concurrent.futures.ThreadPoolExecutor):
    """Workers that die ``deaths`` times when they have done a task, before its result is back; calls are pickled."""

    def __init__(self, deaths=1):
        super().__init__(2)
        self.deaths, self.calls = deaths, {}

    def submit(self, fn, /, *args, **kwargs):
        title = args[0].title
        self.calls[title] = self.calls.get(title, 0) + 1
        return super().submit(self._run, pickle.dumps((fn, args)), self.calls[title] <= self.deaths)

    @staticmethod
    def _run(call, dies):
        fn, args = pickle.loads(call)
        done = pickle.dumps(fn(*args))
        if dies:
            raise ConnectionError("the worker died")
        return pickle.loads(done)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 3000)


def criteo(folder):
    for name, first in (("day_0", 0), ("day_1.gz", 1), ("day_2", 2)):
        write_log(folder / name, 150, first)
    (folder / "day_1.gz").write_bytes(gzip.compress((folder / "day_1.gz").read_bytes(), mtime=0))
    return Criteo("criteo-kaggle"), [str(folder / name) for name in ("day_0", "day_1.gz", "day_2")], {}


def csv_lines(rows, negative="-1"):
    values = random.Random(0)
    for _ in range(rows):
        many = [f"item-{values.randrange(20)}-of-a-long-name" for _ in range(values.randrange(4))]
        weights = "|".join(str(values.randrange(1, 9)) for _ in many)
        text = f"{'value' * values.randrange(1, 5)}{values.randrange(9)}"
        label = values.choice(["1", negative])
        numbers = f"{values.randrange(999)},{values.random():.3f}"
        yield f"{label},{numbers},{text},{'|'.join(many)},{weights},{values.randrange(99)}\n"


def csv(folder, lines=None):
    lines = list(csv_lines(400)) if lines is None else lines
    (folder / "log.csv").write_text(HEADER + "".join(lines))
    (folder / "schema.toml").write_text(SCHEMA)
    return Delimited(load_schema(str(folder / "schema.toml"))), [str(folder / "log.csv")], {}


def csv_with_bad_lines(folder):
    lines = list(csv_lines(400))
    for bad in (3, 250, 399):
        lines[bad] = f"1,{bad}\n"
    source, inputs, _ = csv(folder, lines)
    (folder / "more.csv").write_text(HEADER + "".join(lines[:5]))
    return source, [*inputs, str(folder / "more.csv")], {"on_bad_line": "skip"}


def random_splits(folder):
    return *csv(folder)[:2], {"split_by": "random", "max_rows": 7}


def drawn_negatives(folder):
    """A format whose lines are no examples, so that one process reads it."""
    lines = [f"{i // 15},{7 * i % 31}\n" for i in range(300)]
    (folder / "log").write_text("".join(["user_id,item_id\n", *lines]))
    return MovieLens(MovieLensOptions()), [str(folder / "log")], {}


LOGS = (criteo, csv, csv_with_bad_lines, random_splits, drawn_negatives)


def make(log, out, workers=None, **options):
    source, inputs, own = log
    options = PrepareOptions(block_size=32, shard_examples=64, threads=2, **own, **options)
    messages = []
    prepare(source, inputs, out, options, workers=workers, report=messages.append)
    return files(out), messages


@pytest.mark.parametrize("log", LOGS)
def test_the_dataset_is_that_of_one_process_though_every_worker_dies_once(log, tmp_path):
    one = make(log(tmp_path), tmp_path / "one")
    with LostWorkers() as workers:
        many = make(log(tmp_path), tmp_path / "many", workers)
    assert many == one
    assert set(workers.calls.values()) == {2}
    reads = [what for what in workers.calls if what.startswith("reading ")]
    assert len(reads) > 5 or log is drawn_negatives
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["many", "one"]


def test_rows_of_an_earlier_dataset(tmp_path):
    make(csv(tmp_path), tmp_path / "earlier")
    later = {"vocabulary_from": str(tmp_path / "earlier")}
    one = make(csv(tmp_path), tmp_path / "one", **later)
    with LostWorkers() as workers:
        assert make(csv(tmp_path), tmp_path / "many", workers, **later) == one


def test_what_is_lost_twice_is_named(tmp_path):
    log = criteo(tmp_path)
    with LostWorkers(deaths=2) as workers, pytest.raises(DatasetError) as raised:
        make(log, tmp_path / "out", workers)
    assert f"reading {log[1][0]}, bytes 0 to 3,000 failed 2 times on the workers" in str(raised.value)
    assert "the worker died. See that" in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [0, 170, 399])
def test_a_bad_line_is_named_as_by_one_process(bad, tmp_path):
    lines = list(csv_lines(400))
    lines[bad] = lines[-1] = "1,2\n"
    said = []
    for workers in (None, LostWorkers(deaths=0)):
        with pytest.raises(DatasetError) as raised:
            make(csv(tmp_path, lines), tmp_path / "out", workers)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert f"log.csv:{bad + 2}: " in said[0]


def test_labels_that_only_the_whole_log_contradicts(tmp_path):
    lines = [*csv_lines(200), *csv_lines(200, negative="0")]
    for workers in (None, LostWorkers(deaths=0)):
        with pytest.raises(DatasetError, match="holds both 0 and -1"):
            make(csv(tmp_path, lines), tmp_path / "out", workers)
