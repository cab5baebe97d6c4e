"""What a served model remembers of histories: the same outputs as the whole history gives, whatever is kept."""

import concurrent.futures
import dataclasses
import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_serve import ask, running

import jrec
from jrec.nn.sequences import Remembered, SequenceEncoder
from jrec.run.export import of_run, write_export
from jrec.serving import histories
from jrec.serving.format import APPEND, ExportError, Retrieval
from jrec.serving.http.process import ready_model
from jrec.serving.ids import Ids

ITEMS, DIM, LENGTH = 60, 8, 40
PLENTY = 1 << 24


def run_of(model_class=jrec.nn.NextItem, seed=0, **config):
    layout = jrec.nn.next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=2)
    model = model_class(layout, jrec.nn.SequenceConfig(heads=2, **config), rngs=nnx.Rngs(seed, dropout=1))
    for block in model.encoder.blocks:  # as large as training makes them, so that all terms count
        for name in ("split", "query", "key"):
            if hasattr(block, name):
                getattr(block, name).kernel[...] *= 8
        if hasattr(block, "time_bias"):
            block.time_bias[...] *= 50
            block.position_bias[...] *= 50
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    return jrec.distribute(model, optimizer)


def cache_of(model):
    assert model.history_cache is not None
    return model.history_cache


FORMS = {"hstu": ("hstu", False), "hstu with times": ("hstu", True), "sasrec": ("sasrec", False)}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """An export of each form, with a delta in which rows and the dense part differ."""
    folder = tmp_path_factory.mktemp("exports")
    for name, (kind, timed) in FORMS.items():
        dense = {"age": LENGTH} if timed else []
        with run_of(kind=kind) as run:
            run.export(folder / name, dense=dense)
        with run_of(kind=kind, seed=1) as run:
            run.set_rows("item", np.arange(ITEMS), np.random.default_rng(5).normal(size=(ITEMS, DIM)))
            run.export(folder / f"{name} later", dense=dense, since=[folder / name])
    return folder


def columns_of(lines, ages=None):
    """Requests for histories, and how long ago their items were."""
    width = max(1, *map(len, lines))
    history = np.full((len(lines), width), -1)
    for row, line in zip(history, lines, strict=True):
        row[: len(line)] = line
    columns = {"history": history}
    if ages is not None:
        columns["age"] = np.zeros((len(lines), LENGTH))
        for row, line in zip(columns["age"], ages, strict=True):
            row[: len(line)] = line
    return columns


@pytest.mark.parametrize("form", FORMS)
def test_positions_that_follow_are_those_of_the_whole_history(form):
    kind, timed = FORMS[form]
    config = jrec.nn.SequenceConfig(kind=kind, heads=2, blocks=3)
    encoder = SequenceEncoder(DIM, LENGTH, config, rngs=nnx.Rngs(0))
    encoder.eval()
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, LENGTH, DIM)).astype(np.float32)
    times = np.cumsum(rng.integers(0, 10**5, (3, LENGTH)), axis=1).astype(np.float32) if timed else None
    asked = None if times is None else np.pad(times[:, 1:], ((0, 0), (0, 1)), constant_values=1e7)
    counts = np.array([LENGTH, 17, 5])
    want = np.asarray(encoder(rows, np.arange(LENGTH) < counts[:, None], times, asked))
    # What is not known yet holds numbers that would show if they were read.
    before = [
        Remembered(*(jnp.full((3, LENGTH, *x.shape), 1e3, x.dtype) for x in layer)) for layer in encoder.remembered()
    ]
    first = np.zeros(3, np.int32)
    while (first < counts).any():
        queries = int(rng.integers(1, 9))
        places = np.minimum(first[:, None] + np.arange(queries), LENGTH - 1)
        ours = None if asked is None else np.take_along_axis(asked, places, axis=1)
        some = np.take_along_axis(rows, places[:, :, None], axis=1)
        encoded, own = encoder.extend(some, first, before, times, ours)
        for example, count in enumerate(np.minimum(counts - first, queries)):
            begin = first[example]
            np.testing.assert_allclose(
                encoded[example, :count], want[example, begin : begin + count], rtol=1e-5, atol=1e-5
            )
            before = [
                Remembered(*(kept.at[example, begin : begin + count].set(new[example, :count])
                             for kept, new in zip(*layers, strict=True)))
                for layers in zip(before, own, strict=True)
            ]  # fmt: skip
        first = np.minimum(first + queries, counts).astype(np.int32)


def test_positions_that_change_with_the_length_are_not_extended():
    config = jrec.nn.SequenceConfig(normalize="length")
    encoder = SequenceEncoder(DIM, LENGTH, config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="positions change with its length where HSTU divides by it"):
        encoder.extend(jnp.zeros((1, 1, DIM)), jnp.zeros(1, jnp.int32), [])


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_the_whole_history(exports, form):
    """Histories of many users that grow, are asked again, change at their end, begin anew, and come together."""
    timed = FORMS[form][1]
    plain = jrec.serving.load(exports / form)
    model = jrec.serving.load(exports / form, history_cache=PLENTY)
    rng = np.random.default_rng(1)
    users = [list(rng.integers(0, ITEMS, rng.integers(0, 9))) for _ in range(5)]
    moments = [list(np.sort(rng.integers(0, 10**6, len(user)))) for user in users]
    now = 10**6
    for _ in range(40):
        now += int(rng.integers(0, 10**5))
        for user, at in zip(users, moments, strict=True):
            for _ in range(rng.integers(0, 3) if len(user) < LENGTH - 20 else rng.integers(0, 12)):
                user.append(int(rng.integers(0, ITEMS)))
                at.append(now - int(rng.integers(0, 100)))
            at.sort()
            if user and rng.random() < 0.1:  # the last event was another one, at another time
                user[-1], at[-1] = int(rng.integers(0, ITEMS)), now - int(rng.integers(0, 100))
            if len(user) > LENGTH:
                del user[:], at[:]
        chosen = rng.permutation(5)[: rng.integers(1, 6)]
        ages = [now - np.array(moments[number], float) for number in chosen] if timed else None
        columns = columns_of([users[number] for number in chosen], ages)
        got, want = model.logits(columns)["user"], plain.logits(columns)["user"]
        np.testing.assert_allclose(got, want, atol=1e-5)
    cache = cache_of(model)
    assert cache.kept > 2 * cache.computed > 0
    assert plain.history_cache is None


def test_only_new_items_are_computed(exports):
    model = jrec.serving.load(exports / "hstu", history_cache=PLENTY)
    history = list(range(30))
    for count, kept, computed in ((10, 0, 10), (11, 9, 12), (11, 19, 13), (30, 29, 33)):
        model.logits(columns_of([history[:count]]))
        assert cache_of(model)[2:] == (kept, computed)
    assert cache_of(model).histories == 1  # what goes on takes the place of what it goes on from


def test_an_item_that_came_at_another_time_is_computed_anew(exports):
    """Its time is what the item before it was asked for."""
    plain = jrec.serving.load(exports / "hstu with times")
    model = jrec.serving.load(exports / "hstu with times", history_cache=PLENTY)
    model.logits(columns_of([[1, 2, 3]], [[500_000, 400_000, 10]]))
    for ages in ([500_000, 400_000, 300_000, 1], [500_000, 100, 10, 1]):
        columns = columns_of([[1, 2, 3, 4]], [ages])
        got, want = model.logits(columns)["user"], plain.logits(columns)["user"]
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert cache_of(model).kept == 0
    later = columns_of([[1, 2, 3, 4, 5]], [[500_077, 177, 87, 78, 0]])  # 77 seconds on
    np.testing.assert_allclose(model.logits(later)["user"], plain.logits(later)["user"], atol=1e-6)
    assert cache_of(model).kept == 3


def test_the_limit_holds_and_what_was_not_asked_for_the_longest_goes(exports):
    probe = jrec.serving.load(exports / "hstu", history_cache=PLENTY)
    probe.logits(columns_of([range(LENGTH)]))
    one = cache_of(probe).nbytes
    model = jrec.serving.load(exports / "hstu", history_cache=3 * one)
    users = [np.roll(np.arange(ITEMS), number)[:LENGTH] for number in range(4)]
    for number in (0, 1, 2, 0, 3, 0):
        model.logits(columns_of([users[number]]))
        assert cache_of(model).nbytes <= 3 * one
    assert cache_of(model).histories == 3
    assert cache_of(model).kept == 2 * (LENGTH - 1)
    model.logits(columns_of([users[1]]))  # it went when 3 came
    assert cache_of(model).kept == 2 * (LENGTH - 1)
    small = jrec.serving.load(exports / "hstu", history_cache=one - 1)
    small.logits(columns_of([users[0]]))
    assert cache_of(small)[:2] == (0, 0)
    with pytest.raises(ValueError, match="history_cache is -1 bytes; give 0 or more"):
        jrec.serving.load(exports / "hstu", history_cache=-1)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_kept_beyond_a_delta(exports, form):
    timed = FORMS[form][1]
    model = jrec.serving.load(exports / form, history_cache=PLENTY)
    columns = columns_of([range(20)], [range(20, 0, -1)] if timed else None)
    before = model.logits(columns)["user"]
    model.apply(exports / f"{form} later")
    after = jrec.serving.load(exports / form, [exports / f"{form} later"]).logits(columns)["user"]
    np.testing.assert_allclose(model.logits(columns)["user"], after, atol=1e-6)
    assert np.abs(before - after).max() > 0.01
    assert cache_of(model).kept == 0


def test_a_delta_of_rows_alone_keeps_histories(exports, tmp_path):
    """Its programs are those of the export, the one that goes on from a history's begin among them."""
    edited = {"item": (np.array([3]), np.ones((1, DIM), np.float32))}
    jrec.serving.write_delta(tmp_path / "delta", edited, since=[exports / "hstu"])
    model = jrec.serving.load(exports / "hstu", [tmp_path / "delta"], history_cache=PLENTY)
    plain = jrec.serving.load(exports / "hstu", [tmp_path / "delta"])
    for count in (9, 10):
        columns = columns_of([range(count)])
        np.testing.assert_allclose(model.logits(columns)["user"], plain.logits(columns)["user"], atol=1e-6)
    assert cache_of(model).kept == 8


def test_two_histories_of_one_sum_are_told_apart(exports, monkeypatch):
    """Sums only find histories: they are compared item by item."""
    monkeypatch.setattr(histories.Histories, "_sum", lambda self, ids: 0)
    plain = jrec.serving.load(exports / "hstu")
    model = jrec.serving.load(exports / "hstu", history_cache=PLENTY)
    kept: Any = model._loaded.histories
    kept._factors[:] = 0  # every begin has the sum 0
    for line in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4, 5]):
        columns = columns_of([line])
        np.testing.assert_allclose(model.logits(columns)["user"], plain.logits(columns)["user"], atol=1e-6)


def test_gaps_and_bad_ids(exports):
    plain = jrec.serving.load(exports / "hstu")
    model = jrec.serving.load(exports / "hstu", history_cache=PLENTY)
    dense, ids = np.zeros((2, 0), np.float32), {"history": Ids(values=np.array([[4, -1, 5, 6], [-1, 1, 2, 3]]))}
    np.testing.assert_array_equal(model.logits_of(dense, ids)["user"], plain.logits_of(dense, ids)["user"])
    assert cache_of(model).computed == 0
    with pytest.raises(ValueError, match=f"feature 'history' has id {ITEMS}, but table 'item' has {ITEMS} rows"):
        model.logits({"history": np.array([[1, ITEMS]])})
    with pytest.raises(ValueError, match=f"has {LENGTH + 1} ids in an example"):
        model.logits({"history": np.zeros((1, LENGTH + 1), int)})


def test_threads_share_what_is_kept(exports):
    plain = jrec.serving.load(exports / "hstu")
    model = jrec.serving.load(exports / "hstu", history_cache=6_000)  # room for some of them
    model.warm_up()
    users = [np.roll(np.arange(ITEMS), 3 * number)[:LENGTH] for number in range(6)]
    want = {
        (number, count): plain.logits(columns_of([users[number][:count]]))["user"]
        for number in range(6)
        for count in range(1, LENGTH, 6)
    }

    def ask(seed):
        order = np.random.default_rng(seed).permutation(len(want))
        return max(
            float(np.abs(model.logits(columns_of([users[number][:count]]))["user"] - want[number, count]).max())
            for number, count in (list(want)[place] for place in order)
        )

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert max(threads.map(ask, range(8))) < 1e-5
    assert 0 < cache_of(model).nbytes <= 6_000


def test_a_server_says_what_it_kept(tmp_path):
    with run_of() as run:
        source = of_run(run._state, step=0, dense=(), schema=None)
        retrieval = Retrieval(history="history", table="item", leaves_out_history=True, left_out_row=None)
        source = dataclasses.replace(source, retrieval=retrieval, requested=("history",))
        write_export(source, tmp_path / "export", about={})
    load = functools.partial(ready_model, check=True, batch_rows=4, threads=1, history_cache=PLENTY)
    want = jrec.serving.load(tmp_path / "export")
    with running(tmp_path / "export", load=load) as served:
        for count in (5, 6, 7):
            columns = {"history": [list(range(count))] * 2}
            status, _, body = ask(served.port, "/predict?k=3", {"columns": columns})
            assert (status, json.loads(body)["items"]) == (200, want.best(columns, k=3).items)
        _, _, text = ask(served.port, "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    counts = {how: float(lines[f'jrec_history_items_total{{how="{how}"}}']) for how in ("kept", "computed")}
    # Both rows of the first request are computed, and one of each request that follows, beside the last item.
    assert counts["kept"] + counts["computed"] == 2 * (5 + 6 + 7)
    assert counts["kept"] >= 2 * (4 + 5) - 1
    assert float(lines["jrec_history_cache_histories"]) >= 1
    assert 0 < float(lines["jrec_history_cache_bytes"]) <= PLENTY


class Louder(jrec.nn.NextItem):
    """Other vectors than those of ``extend``."""

    def logits(self, dense, activations, bags):
        return {name: 2 * value for name, value in super().logits(dense, activations, bags).items()}


@pytest.mark.parametrize(
    ("model_class", "config"), [(jrec.nn.NextItem, {"normalize": "length"}), (Louder, {})], ids=["by length", "own"]
)
def test_models_that_cannot_go_on_keep_nothing(tmp_path, model_class, config):
    with run_of(model_class, **config) as run:
        run.export(tmp_path / "export")
    assert not (tmp_path / "export" / APPEND).exists()
    model = jrec.serving.load(tmp_path / "export", history_cache=PLENTY)
    plain = jrec.serving.load(tmp_path / "export")
    assert model.history_cache is None
    for count in (3, 4):
        columns = columns_of([range(count)])
        np.testing.assert_array_equal(model.logits(columns)["user"], plain.logits(columns)["user"])


@pytest.mark.parametrize("fault", ["other times", "no program"])
def test_another_program_is_refused(exports, monkeypatch, fault):
    monkeypatch.setattr("jrec.serving.model.verify", lambda *args, **options: None)
    folder, damaged = exports / "hstu", exports / fault
    damaged.mkdir()
    for path in folder.rglob("*"):
        if path.is_file():
            target = damaged / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    (damaged / APPEND).write_bytes((exports / "hstu with times" / APPEND).read_bytes() if "times" in fault else b"x")
    message = "is no program of the feature 'history' with dim 8" if "times" in fault else "cannot be read"
    with pytest.raises(ExportError, match=f"{APPEND} {message}.*export the run again"):
        jrec.serving.load(damaged, history_cache=PLENTY)
    jrec.serving.load(damaged)  # without a cache nobody reads it
