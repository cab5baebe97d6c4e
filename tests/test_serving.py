"""Exports in use: what a request may hold, deltas that fail midway, damaged and inconsistent folders."""

import contextlib
import dataclasses
import linecache
import pathlib
import shutil
import sys
import threading

import numpy as np
import pytest
from export_cases import SIZES, made_exports, reseal

from jrec import serving
from jrec.errors import JrecError
from jrec.serving import arrays, checks, encode, loaded_program, model, tables
from jrec.serving.ids import Ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def request_(folder):
    """Raw columns of some examples, which read all rows."""
    rng = np.random.default_rng(0)
    count = 70
    columns = {
        "price": rng.gamma(2.0, size=count).round(2),
        "user": [f"u{n}" for n in range(count)],
        "item": [f"i{n}" for n in range(count)],
        "history": [[f"i{n}" for n in rng.integers(0, 70, rng.integers(0, 6))] for _ in range(count)],
    }
    columns["strengths"] = [[round(float(x), 3) for x in rng.random(len(h))] for h in columns["history"]]
    return columns


@pytest.fixture(scope="module")
def states(folder, request_):
    """Logits of the export, and after each of its deltas."""
    paths = [folder / name for name in ("whole", "delta1", "delta2")]
    return [serving.load(paths[0], paths[1:n], batch_sizes=SIZES).logits(request_) for n in (1, 2, 3)]


def equal_to(states, logits):
    return [k for k, state in enumerate(states) if np.array_equal(state, logits)]


def test_a_delta_changes_rows_in_place_all_rows_of_a_table_and_the_program(folder, states):
    assert not np.array_equal(states[0], states[1])
    assert not np.array_equal(states[1], states[2])
    changed = {
        table: [bool(p.changed) for p in parts]
        for table, parts in checks.load_manifest(folder / "delta1").tables.items()
    }
    assert changed == {"user": [True], "item": [True, False]}


# Deltas: the old model or the new one


class Interrupted(BaseException):
    pass


@contextlib.contextmanager
def interrupting(number, modules, error):
    """Raises at the ``number``-th line of the modules that runs; yields a list that gets every line's place.

    Lines of ``with`` and ``try`` are left out, where a tracer may raise, but no interrupt: they also stand for letting
    go of a lock, and for no instruction at all.
    """
    files, seen = {module.__file__ for module in modules}, []

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
        if event == "line" and line[0] not in ("with", "try:"):
            seen.append(f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(seen) - 1 == number:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def test_a_delta_is_compiled_for_the_sizes_that_are_in_use(folder, request_):
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    loaded.logits(request_)
    before = loaded._loaded.program
    loaded.apply(folder / "delta1")
    assert loaded._loaded.program is not before
    assert loaded._loaded.program.sizes == before.sizes == {16}


def test_a_delta_that_fails_at_any_line_changes_nothing(folder, states, request_, monkeypatch):
    monkeypatch.setattr(loaded_program.LoadedProgram, "warm_up", lambda *_: None)  # takes most of the time
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    manifest, where = loaded.manifest, (model, tables, arrays, encode, loaded_program)
    applied, number = False, 0
    while not applied:
        with interrupting(number, where, Interrupted if number % 2 else MemoryError) as seen:
            try:
                loaded.apply(folder / "delta1")
                applied = len(seen) <= number
            except (MemoryError, Interrupted):
                pass
        if not applied:
            np.testing.assert_array_equal(loaded.logits(request_), states[0], err_msg=seen[-1])
            assert loaded.manifest is manifest, seen[-1]
        number += 1
    assert number > 50
    np.testing.assert_array_equal(loaded.logits(request_), states[1])
    loaded.apply(folder / "delta2")
    np.testing.assert_array_equal(loaded.logits(request_), states[2])


@pytest.mark.parametrize("how", ["missing", "cut", "longer"])
def test_a_delta_with_a_bad_file_changes_nothing(how, folder, states, request_, tmp_path):
    """Also where the checksums fit, as when a program with a defect had written the file."""
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    manifest = loaded.manifest
    files = checks.load_manifest(folder / "delta1").files
    assert {"tables/user.changed.npy", "tables/item.core-0.npy", "keys/user.npy"} <= files.keys()
    for file in files:
        delta = tmp_path / file.replace("/", "-")
        shutil.copytree(folder / "delta1", delta)
        content = (delta / file).read_bytes()
        if how == "missing":
            (delta / file).unlink()
        else:
            (delta / file).write_bytes(content[: len(content) // 2] if how == "cut" else content + b"0")
            reseal(delta, files=(file,) if file.endswith(".npy") or how == "cut" else ())
        with pytest.raises(serving.ExportError, match=pathlib.Path(file).name):
            loaded.apply(delta)
        assert loaded.manifest is manifest
        np.testing.assert_array_equal(loaded.logits(request_), states[0])
    loaded.apply(folder / "delta1")
    np.testing.assert_array_equal(loaded.logits(request_), states[1])


DELTAS = {
    "rows past the table": lambda rows: rows + 10**6,
    "rows twice": lambda rows: np.zeros_like(rows),
    "negative rows": lambda rows: rows - rows[-1] - 1,
    "descending rows": lambda rows: rows[::-1].copy(),
    "another number of rows": lambda rows: rows[:-1],
    "int32": lambda rows: rows.astype(np.int32),
    "floats": lambda rows: rows.astype(np.float64),
    "a matrix": lambda rows: rows[:, None],
}


@pytest.mark.parametrize("fault", DELTAS)
def test_a_delta_of_other_rows_changes_nothing(fault, folder, states, request_, tmp_path):
    delta = tmp_path / "delta"
    shutil.copytree(folder / "delta1", delta)
    changed = delta / "tables" / "user.changed.npy"
    np.save(changed, DELTAS[fault](np.load(changed)))
    reseal(delta, files=("tables/user.changed.npy",))
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    with pytest.raises(serving.ExportError, match=r"tables/user(.changed)?\.npy"):
        loaded.apply(delta)
    np.testing.assert_array_equal(loaded.logits(request_), states[0])


def test_a_delta_of_another_model_changes_nothing(folder, states, request_, tmp_path):
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    for number, (change, message) in enumerate(
        (
            (lambda m: m.update(dense=["cost"]), "dense is"),
            (lambda m: m.update(rows="0" * 64), "rows mean other values"),
            (lambda m: m["features"].pop(), "features is"),
            (lambda m: m["tables"].pop("user"), "reads table 'user'"),
            (lambda m: m["tables"].update(other=[]), "has no parts"),
            (lambda m: m["tables"]["user"][0].update(rows=10), "table 'user' has parts"),
            (lambda m: m["files"].pop("keys/user.npy"), "keys/user.npy"),
        )
    ):
        delta = tmp_path / str(number)
        shutil.copytree(folder / "delta1", delta)
        reseal(delta, change)
        with pytest.raises(serving.ExportError, match=message):
            loaded.apply(delta)
        np.testing.assert_array_equal(loaded.logits(request_), states[0])


class Waiting:
    """A lock that lets something happen before a request gets it."""

    def __init__(self, lock, happens):
        self._lock, self._happens = lock, happens

    def __enter__(self):
        if (happens := self._happens) is not None:
            self._happens = None
            happens()
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


@pytest.mark.parametrize("kind", ["columns", "ids"])
def test_a_request_that_waits_for_a_delta_is_scored_by_one_model(kind, folder, states, request_):
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    dense, ids = loaded.encode(request_)
    loaded._rows_lock = Waiting(loaded._rows_lock, lambda: loaded.apply(folder / "delta1"))
    if kind == "columns":
        np.testing.assert_array_equal(loaded.logits(request_), states[1])
    else:  # whose rows may be other users' now
        after = serving.load(folder / "whole", [folder / "delta1"], batch_sizes=SIZES)
        np.testing.assert_array_equal(loaded.logits_of(dense, ids), after.logits_of(dense, ids))


def test_requests_beside_deltas_are_scored_by_one_model_each(folder, states, request_):
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    found, stop = set(), threading.Event()

    def ask():
        while not stop.is_set():
            found.add(tuple(equal_to(states, loaded.logits(request_))))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for name in ("delta1", "delta2"):
            loaded.apply(folder / name)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    found.add(tuple(equal_to(states, loaded.logits(request_))))
    assert found <= {(0,), (1,), (2,)}
    assert (2,) in found


def test_the_same_delta_twice_at_once_is_applied_once(folder, states, request_):
    loaded = serving.load(folder / "whole", batch_sizes=SIZES)
    refused = []

    def apply():
        try:
            loaded.apply(folder / "delta1")
        except serving.ExportError as problem:
            refused.append(str(problem))

    threads = [threading.Thread(target=apply) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert "is what was taken last; each delta is applied once" in refused[0]
    np.testing.assert_array_equal(loaded.logits(request_), states[1])


# What a request may hold


@pytest.fixture(scope="module")
def few(request_):
    return {name: column[:9] for name, column in request_.items()}


def asked(loaded, few):
    dense, ids = loaded.encode(few)
    return dense, dict(ids)


def user(values, offsets=None, weights=None):
    return {"user": Ids(values=values, offsets=offsets, weights=weights)}


ONES = np.zeros((9, 1), np.int32)
BAD_IDS = {
    "past the table": (user(ONES + 10**6), "feature 'user' has id 1,000,000, but table 'user' has [0-9]+ rows"),
    "below -1": (user(ONES - 2), "feature 'user' has id -2"),
    "past int32": (user(ONES.astype(np.int64) + 2**32), "feature 'user' has id 4,294,967,296"),
    "floats": (user(ONES.astype(np.float32)), r"feature 'user' has ids of float32\[9, 1\]; give int32"),
    "booleans": (user(ONES.astype(bool)), "feature 'user' has ids of bool"),
    "objects": (user(ONES.astype(object)), "feature 'user' has ids of object"),
    "a vector": (user(ONES[:, 0]), r"feature 'user' has ids of int32\[9\]; give int32 of \(examples, up to 1\)"),
    "too long": (user(np.zeros((9, 2), np.int32)), "feature 'user' has 2 ids in an example, but at most 1 fit"),
    "too few examples": (user(ONES[:8]), "feature 'user' has ids of 8 examples, but there are 9"),
    "no Ids": ({"user": ONES}, "feature 'user' has a ndarray; give jrec.serving.Ids"),
    "missing": ({"user": None}, "ids of feature 'user' are missing"),
    "unknown": ({"buyer": Ids(values=ONES)}, "ids of feature 'buyer' are of no feature of the model"),
    "weights": (user(ONES, weights=np.ones((9, 1), np.float32)), "feature 'user' has weights, but it is not"),
    "a matrix beside offsets": (user(ONES, np.arange(10, dtype=np.int32)), "feature 'user' has ids of"),
    "descending offsets": (user(ONES[:, 0], np.arange(10, dtype=np.int32)[::-1]), "feature 'user' has offsets"),
    "offsets past the ids": (user(ONES[:5, 0], np.arange(10, dtype=np.int32)), "feature 'user' has offsets"),
    "float offsets": (user(ONES[:, 0], np.arange(10.0)), "feature 'user' has offsets of float64"),
    "no offsets": (user(ONES[:, 0], np.zeros(0, np.int32)), "feature 'user' has offsets of"),
    "too long by offsets": (
        user(ONES[:, 0], np.array([0, 2, 2, 3, 4, 5, 6, 7, 8, 9], np.int32)), "feature 'user' has 2 ids in an example"
    ),
}  # fmt: skip
BAD_WEIGHTS = {
    "missing": (lambda w: None, "feature 'history' is weighted; give weights"),
    "a matrix": (lambda w: w[:, None], "feature 'history' has weights of float32"),
    "too few": (lambda w: w[:-1], "feature 'history' has weights of float32"),
    "objects": (lambda w: w.astype(object), "feature 'history' has weights of object"),
    "NaN": (lambda w: np.where(np.arange(w.size) == 3, np.nan, w), "feature 'history' has weight nan"),
}
BAD_DENSE = {
    "more columns": (np.zeros((9, 3), np.float32), r"dense is float32\[9, 3\]; give float32 of \(examples, 1\).*price"),
    "no column": (np.zeros((9, 0), np.float32), r"dense is float32\[9, 0\]"),
    "a vector": (np.zeros(9, np.float32), r"dense is float32\[9\]"),
    "a cube": (np.zeros((9, 1, 1), np.float32), r"dense is float32\[9, 1, 1\]"),
    "objects": (np.zeros((9, 1), object), "dense is object"),
    "texts": (np.full((9, 1), "1.5"), "dense is <U3"),
    "complex numbers": (np.zeros((9, 1), complex), "dense is complex128"),
    "NaN": (np.full((9, 1), np.nan, np.float32), "dense feature 'price' is nan in example 0"),
    "past float32": (np.full((9, 1), 1e300), r"dense feature 'price' is 1e\+300 in example 0"),
    "other examples": (np.zeros((7, 1), np.float32), "has ids of 9 examples, but there are 7"),
}


@pytest.fixture(scope="module")
def loaded(folder):
    return serving.load(folder / "whole", batch_sizes=SIZES)


@pytest.mark.parametrize("fault", BAD_IDS)
def test_bad_ids_are_refused(fault, loaded, few):
    dense, ids = asked(loaded, few)
    changed, message = BAD_IDS[fault]
    ids = {name: one for name, one in (ids | changed).items() if one is not None}
    with pytest.raises(ValueError, match=message):
        loaded.logits_of(dense, ids)
    with pytest.raises(ValueError, match=message if "examples" not in fault else "'item' has ids of 9 examples"):
        loaded.vectors(ids)


def test_the_last_row_is_one_and_the_next_is_none(loaded, few):
    dense, ids = asked(loaded, few)
    rows = sum(part.rows for part in loaded.manifest.tables["user"])
    none = Ids(values=np.zeros(0, np.int32), offsets=np.zeros(10, np.int32), weights=np.zeros(0, np.float32))
    last = {name: none if name == "history" else one for name, one in ids.items()} | user(ONES + rows - 1)
    assert np.isfinite(loaded.logits_of(dense, last)).all()
    for dtype in (np.int32, np.int64):
        with pytest.raises(ValueError, match=f"feature 'user' has id {rows:,}, but table 'user' has {rows:,} rows"):
            loaded.logits_of(dense, last | user((ONES + rows).astype(dtype)))


@pytest.mark.parametrize("fault", BAD_WEIGHTS)
def test_bad_weights_are_refused(fault, loaded, few):
    dense, ids = asked(loaded, few)
    change, message = BAD_WEIGHTS[fault]
    ids["history"] = dataclasses.replace(ids["history"], weights=change(ids["history"].weights))
    for call in (lambda: loaded.logits_of(dense, ids), lambda: loaded.vectors(ids)):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("fault", BAD_DENSE)
def test_bad_dense_features_are_refused(fault, loaded, few):
    dense, message = BAD_DENSE[fault]
    with pytest.raises(ValueError, match=message):
        loaded.logits_of(dense, asked(loaded, few)[1])


def test_other_forms_of_a_fewgive_the_same_scores(loaded, few):
    """Other integers, padded lists, padding behind ragged ones, whatever it holds."""
    dense, ids = asked(loaded, few)
    want = loaded.logits_of(dense, ids)
    padded, weights = ids["history"].padded(5)
    wide = {name: dataclasses.replace(one, values=one.values.astype(np.int64)) for name, one in ids.items()}
    behind = dataclasses.replace(
        ids["history"],
        values=np.append(ids["history"].values, np.int32(10**8)),
        weights=np.append(ids["history"].weights, np.float32("nan")),
    )
    for form in (wide, ids | {"history": Ids(values=padded, weights=weights)}, ids | {"history": behind}):
        np.testing.assert_array_equal(loaded.logits_of(dense.astype(np.float64), form), want)


def test_examples_without_ids_have_scores(loaded):
    ids = {
        "user": Ids(values=np.zeros((2, 0), np.int32)),
        "item": Ids(values=np.full((2, 1), -1, np.int32)),
        "history": Ids(values=np.zeros((2, 0), np.int32), weights=np.zeros((2, 0), np.float32)),
    }
    logits = loaded.logits_of(np.zeros((2, 1), np.float32), ids)
    assert np.isfinite(logits).all()
    assert logits[0] == logits[1]


BAD_COLUMNS = {
    "unequal": {"price": np.ones(8)},
    "lists": {"user": [["u1"]] * 9},
    "a matrix": {"user": np.ones((9, 2), int)},
    "infinite": {"price": np.full(9, np.inf)},
    "objects": {"price": np.array([object()] * 9)},
    "too many": {"history": [["i1"] * 60] * 9},
    "weights of others": {"strengths": [[1.0]] * 9},
}


@pytest.mark.parametrize("fault", BAD_COLUMNS)
def test_bad_columns_are_refused(fault, loaded, few):
    with pytest.raises((ValueError, JrecError), match="|".join(BAD_COLUMNS[fault])):
        loaded(few | BAD_COLUMNS[fault])
