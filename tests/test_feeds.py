"""Feeds that work ahead of the steps: how far, what goes wrong, where they stand, and how they end."""

import inspect
import itertools
import re
import threading
import time

import numpy as np
import pytest
from distribute_cases import DENSE, columns
from grids import some_of
from test_distribute import placed

import jrec
from jrec.data import pack_batch
from jrec.run.feeds.options import PackingOptions

AHEAD = ("mesh", "host-pipeline", "plan-four")


def working():
    """The names of the threads of feeds, but of those that end within some seconds."""
    deadline, names = time.monotonic() + 2, [""]
    while names and time.monotonic() < deadline:
        names = sorted(t.name for t in threading.enumerate() if re.match(r"jrec-(?!native)", t.name))
        time.sleep(0.01)
    return names


def steps(step, feed, count):
    return [float(step(next(feed))[0]) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "workers"), some_of(itertools.product(AHEAD, (0, 2)), ("host-pipeline", 0), ("plan-four", 2))
)
def test_a_feed_stands_behind_its_last_step_however_far_it_read(name, workers):
    taken = itertools.count()
    items = (columns(next(taken)) for _ in iter(int, 1))
    with placed(name) as run:
        step, feed = run.compile(), run.feed(items, dense=DENSE, workers=workers)
        assert feed.position() == {"batches": 0}
        batch = next(feed)
        time.sleep(0.2)
        assert feed.position() == {"batches": 0}
        step(batch)
        assert feed.position() == {"batches": 1}
        steps(step, feed, 2)
        assert feed.position() == {"batches": 3}
        time.sleep(0.2)
        assert 4 < next(taken) < 20  # some batches ahead, and no more
        feed.close()
        assert feed.position() == {"batches": 3}
    assert not working()


@pytest.mark.parametrize("name", some_of([*AHEAD, "device"], "host-pipeline", "plan-four", "device"))
def test_an_error_comes_at_its_batch_and_stays(name):
    items = [columns(n) for n in range(7)]  # the first four decide sizes
    items[5] |= {"item": np.full(16, 99)}
    with placed(name) as run:
        step, feed = run.compile(), run.feed(items, dense=DENSE)
        steps(step, feed, 5)
        with pytest.raises(jrec.data.DatasetError, match="id 99 of feature 'item'"):
            next(feed)
        assert feed.position() == {"batches": 5}
        if name in AHEAD:
            with pytest.raises(jrec.data.DatasetError, match="id 99 of feature 'item'"):
                next(feed)
    assert not working()


@pytest.mark.parametrize("name", ["mesh", "mesh-planned"])
def test_an_error_while_a_batch_is_brought_to_the_mesh_comes_at_its_batch(name, monkeypatch):
    made = itertools.count()

    def failing(*arguments):
        if next(made) == 2:
            raise OSError("the device is gone")
        return stacked(*arguments)

    stacked = jrec.run.feeds.partitioned.stacked
    monkeypatch.setattr(jrec.run.feeds.partitioned, "stacked", failing)
    with placed(name) as run:
        step, feed = run.compile(), run.feed(map(columns, range(9)), dense=DENSE)
        steps(step, feed, 2)
        with pytest.raises(OSError, match="the device is gone"):
            next(feed)
    assert not working()


@pytest.mark.parametrize("name", some_of(AHEAD, "host-pipeline", "plan-four"))
def test_a_feed_that_waits_for_the_programs_next_batch_ends_at_once(name):
    go_on = threading.Event()

    def items():
        yield from map(columns, range(4))  # which decide the first sizes
        go_on.wait(60)

    with placed(name) as run:
        step, feed = run.compile(), run.feed(items(), dense=DENSE)
        steps(step, feed, 2)
        time.sleep(0.1)
        begin = time.monotonic()
        feed.close()
        assert time.monotonic() - begin < 5
        assert working() in ([], ["jrec-read"])  # the program's own iterator ends when it can
        go_on.set()
    assert not working()


@pytest.mark.parametrize("name", some_of(AHEAD, "host-pipeline", "plan-four"))
def test_a_feed_gives_as_many_batches_as_the_run_takes_and_no_more(name):
    with placed(name) as run:
        feed = run.feed(map(columns, range(9)), dense=DENSE, total=3)
        assert len(steps(run.compile(), feed, 3)) == 3
        with pytest.raises(StopIteration):
            next(feed)
        assert feed.closed
        assert not list(run.feed([], dense=DENSE))
    assert not working()


def test_packing_options_are_the_further_arguments_of_pack_batch():
    packing = set(inspect.signature(pack_batch).parameters) - {"layout", "columns", "cast"}
    named = packing & inspect.signature(jrec.Run.feed).parameters.keys()
    assert packing - named == PackingOptions.__optional_keys__
