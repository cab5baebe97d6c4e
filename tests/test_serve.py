"""`jrec serve` over real connections: scores, bad requests, full queues, deltas under load, and the end."""

import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pyarrow as pa
import pytest
from export_cases import SIZES, made_exports, reseal
from serve_cases import Fake, stream

from jrec import cli, serving
from jrec.serving.http import bodies
from jrec.serving.http.app import Options
from jrec.serving.http.batcher import Limits
from jrec.serving.http.follower import Follower
from jrec.serving.http.process import http_server, make
from jrec.serving.model import OutdatedError

ROOT = pathlib.Path(__file__).parents[1]
JSON, ARROW = bodies.JSON, bodies.ARROW
ROWS = [
    {"user": "u1", "item": "i2", "price": 3.5, "history": ["i1", "i7"], "strengths": [1.0, 0.5]},
    {"user": "nobody", "item": "i9", "price": None, "history": [], "strengths": []},
    {"user": "u3", "item": None, "price": 20, "history": ["i4"], "strengths": [0.25]},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def expected(folder):
    """Scores of COLUMNS by version: of the export, and after each of its deltas."""
    model, found = serving.load(folder / "whole", batch_sizes=SIZES), {}
    for delta in (None, "delta1", "delta2"):
        if delta is not None:
            model.apply(folder / delta)
        found[model.manifest.id[:12]] = model(COLUMNS)
    return found


@contextlib.contextmanager
def running(export, deltas=None, *, limits=None, options=None, load=None, connections=None, grace=20):
    """A server in a thread; gives its port, the server and the follower."""
    follower = Follower(export, deltas, load=load or (lambda path: serving.load(path, batch_sizes=SIZES)))
    made = make(
        follower,
        limits or Limits(batch_rows=16, delay=0, queue_rows=100),
        options or Options(max_rows=50, max_bytes=20_000, poll=0),
    )
    server = http_server(made, grace=grace, connections=connections)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        port = listening.getsockname()[1]
        yield types.SimpleNamespace(port=port, server=server, thread=thread, follower=follower, made=made)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def ask(port, path="/predict", content=None, kind=JSON, method=None, **headers):
    """A request over a connection of its own: status, headers, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    given = {} if kind is None or (content is None and method != "POST") else {"Content-Type": kind}
    body = json.dumps(content) if isinstance(content, dict) else content
    connection.request(method or ("GET" if content is None else "POST"), path, body, given | headers)
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, response.headers, response.read()


@pytest.fixture(scope="module")
def port(folder):
    with running(folder / "whole") as served:
        yield served.port


# Scores


@pytest.mark.parametrize("content", [{"rows": ROWS}, {"columns": COLUMNS}])
def test_scores_of_json(content, port, expected):
    version, scores = next(iter(expected.items()))
    status, headers, body = ask(port, content=content)
    assert (status, headers["X-Jrec-Version"], headers["Content-Type"]) == (200, version, JSON)
    assert json.loads(body)["version"] == version
    np.testing.assert_array_equal(np.float32(json.loads(body)["scores"]), scores)


@pytest.mark.parametrize("categorical", [False, True])
def test_scores_of_arrow(categorical, port, expected):
    version, scores = next(iter(expected.items()))
    table = pa.table(COLUMNS)
    if categorical:
        table = table.set_column(0, "user", table["user"].dictionary_encode())
    status, headers, body = ask(port, content=stream(table), kind=ARROW)
    assert (status, headers["X-Jrec-Version"], headers["Content-Type"]) == (200, version, ARROW)
    answered = pa.ipc.open_stream(body).read_all()
    assert answered.schema.metadata == {b"version": version.encode()}
    np.testing.assert_array_equal(answered["score"].to_numpy(), scores)


def test_the_answer_has_the_accepted_form(port):
    for accepted, kind in ((ARROW, ARROW), (f"{JSON}, {ARROW}", JSON), ("*/*", JSON)):
        assert ask(port, content={"rows": ROWS}, Accept=accepted)[1]["Content-Type"] == kind
    assert ask(port, content=stream(pa.table(COLUMNS)), kind=ARROW, Accept=JSON)[1]["Content-Type"] == JSON


def test_instances_are_answered_by_predictions(port, expected):
    version, scores = next(iter(expected.items()))
    answered = json.loads(ask(port, content={"instances": ROWS})[2])
    assert answered.keys() == {"predictions", "version"}
    assert answered["version"] == version
    np.testing.assert_array_equal(np.float32(answered["predictions"]), scores)
    assert ask(port, content={"instances": ROWS}, Accept=ARROW)[1]["Content-Type"] == ARROW
    status, _, body = ask(port, content={"instances": ROWS, "rows": ROWS})
    assert (status, "has rows and instances; give" in body.decode()) == (422, True)


@pytest.mark.parametrize(
    ("beside", "refused"),
    [
        ({"signature_name": "serving_default"}, ""),
        ({"parameters": None}, ""),
        ({"parameters": {}}, ""),
        ({"signature_name": "classify"}, "signature_name is 'classify', but there is only 'serving_default'"),
        ({"parameters": {"threshold": 0.5}}, "the model takes no parameters, such as 'threshold'; leave them out"),
    ],
)
def test_what_clients_of_other_servers_send_beside_instances(beside, refused, port, expected):
    status, _, body = ask(port, content={"instances": ROWS, **beside})
    answered = json.loads(body)
    if refused:
        assert (status, refused in answered["error"]) == (422, True)
    else:
        np.testing.assert_array_equal(np.float32(answered["predictions"]), next(iter(expected.values())))


def test_no_rows_have_no_scores(port):
    empty = {name: [] for name in COLUMNS}
    for content in ({"columns": empty}, {"rows": []}):
        assert json.loads(ask(port, content=content)[2])["scores"] == []
    assert json.loads(ask(port, content={"instances": []})[2])["predictions"] == []
    assert ask(port, content=stream(pa.table(COLUMNS).slice(0, 0)), kind=ARROW)[0] == 200


# What is refused


def changed(**columns):
    return {"columns": COLUMNS | columns}


BAD = {
    "no JSON": (400, "{", "the body is not JSON"),
    "deep": (400, '{"rows": [{"user": ' + "[" * 5000, "the body is not JSON"),
    "not UTF-8": (400, b'{"rows": [{"user": "\xff"}]}', "the body is not JSON"),
    "NaN": (400, '{"columns": {"price": [NaN]}}', "the body is not JSON"),
    "a list": (422, "[1]", "another form"),
    "an unknown key": (422, {"examples": []}, "examples"),
    "rows and columns": (422, {"rows": ROWS, "columns": COLUMNS}, "has rows and columns; give"),
    "neither": (422, {}, "neither rows nor columns"),
    "a row that is none": (422, {"rows": [ROWS[0], 3]}, r"\$.rows\[1\]"),
    "a column that is none": (422, {"columns": {"user": "u1"}}, r"\$.columns"),
    "a row without a column": (422, {"rows": [ROWS[0], {"user": "u1"}]}, "row 1 has no column 'history', but"),
    "a row with one more": (422, {"rows": [ROWS[0], ROWS[1] | {"x": 1}]}, "row 0 has no column 'x', but row 1 has"),
    "unequal columns": (422, changed(user=["u1"]), "column 'user' has 1 values, but column 'item' 3"),
    "a missing column": (422, {"columns": {"user": ["u1"]}}, "item, history, strengths are missing|missing"),
    "a text for a number": (422, changed(price=["1", "cheap", "2"]), "column 'price' holds 'cheap' in example 1"),
    "an infinite number": (422, changed(price=[1, 2, 1e999]), "column 'price'|not JSON"),
    "a list for a value": (422, changed(user=[["u1"], [], []]), "column 'user' holds lists"),
    "an object": (422, changed(user=["u1", {"a": 1}, "u2"]), "column 'user' .* at example 1"),
    "too many in a list": (422, changed(history=[["i1"] * 51] * 3), "history"),
    "too many rows": (413, {"columns": {"user": ["u1"] * 51}}, "51 rows, but at most 50"),
    "a large body": (413, {"columns": {"user": ["u" * 30_000]}}, "but at most 20,000 are read"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_requests_are_told_what_is_wrong(fault, port):
    code, content, message = BAD[fault]
    status, _, body = ask(port, content=content)
    assert status in ((code, 400) if fault == "an infinite number" else (code,)), body
    assert re.search(message, json.loads(body)["error"]), body


def test_a_body_of_unknown_length_is_cut_off(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/predict", iter([b"x" * 15_000] * 2), {"Content-Type": JSON}, encode_chunked=True)
        assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    ("kind", "headers"), [("text/csv", {}), (JSON, {"Content-Encoding": "gzip"}), (ARROW, {"Content-Encoding": "br"})]
)
def test_other_content_types_are_refused(kind, headers, port):
    status, _, body = ask(port, content=b"{}", kind=kind, **headers)
    assert status == 415
    assert json.loads(body)["kind"] == "media_type"


def test_other_paths_and_methods_are_refused(port):
    assert ask(port, "/predict")[0] == 405
    assert ask(port, "/v1/models")[0] == 404


def test_damaged_arrow_streams_are_refused(port):
    whole, rng = stream(pa.table(COLUMNS)), random.Random(0)
    statuses = set()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        statuses.add(ask(port, content=bytes(damaged[: rng.randint(1, len(damaged))]), kind=ARROW)[0])
    assert statuses <= {200, 400, 413, 422}
    assert 400 in statuses


# Full queues and defects


@pytest.fixture
def fake():
    return Fake()


def test_a_full_queue_is_503(folder, fake):
    limits = Limits(batch_rows=1, delay=0, queue_rows=1)
    with running(folder / "whole", limits=limits, load=lambda path: fake) as served, futures() as pool:
        content = {"columns": {"x": [1]}}
        begun = [pool.submit(ask, served.port, content=content)]
        assert fake.begun.wait(30)
        begun.append(pool.submit(ask, served.port, content=content))
        while b"jrec_queue_requests 1.0" not in ask(served.port, "/metrics")[2]:
            time.sleep(0.01)
        status, headers, body = ask(served.port, content=content)
        fake.go.set()
        assert (status, headers["Retry-After"], json.loads(body)["kind"]) == (503, "1", "queue_full")
        assert [one.result()[0] for one in begun] == [200, 200]


def test_a_defect_is_500_and_says_so_in_the_log_alone(folder, fake, capfd):
    fake.go.set()
    fake.answer = lambda request, k: 1 / 0
    with running(folder / "whole", load=lambda path: fake) as served:
        status, _, body = ask(served.port, content={"columns": {"x": [1]}})
    assert status == 500
    assert "division" not in body.decode()
    assert "ZeroDivisionError: division by zero" in capfd.readouterr().err


def futures():
    return concurrent.futures.ThreadPoolExecutor(8)


# Health and metrics


def test_health_and_metrics(folder, expected):
    version = next(iter(expected))
    with running(folder / "whole") as served:
        assert ask(served.port, "/healthz")[0] == 200
        status, _, body = ask(served.port, "/readyz")
        state = json.loads(body)
        assert (status, state["ready"], state["version"]) == (200, True, version)
        written = (folder / "whole" / "manifest.json").stat().st_mtime
        assert abs(time.time() - written - state["age_seconds"]) < 5
        ask(served.port, content={"rows": ROWS})
        ask(served.port, content="{")
        _, headers, text = ask(served.port, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=")
    lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    want = {
        'jrec_requests_total{code="200"}': 1, 'jrec_requests_total{code="400"}': 1, "jrec_rows_total": 3,
        'jrec_errors_total{kind="malformed"}': 1, "jrec_request_seconds_count": 2, "jrec_batch_rows_sum": 3,
        "jrec_batch_requests_sum": 1, "jrec_queue_rows": 0, 'jrec_takeovers_total{outcome="taken"}': 0,
    }  # fmt: skip
    assert {name: float(lines[name]) for name in want} == want
    of_users = {name: float(lines[f'jrec_{name}_total{{feature="user"}}']) for name in ("values", "unknown_values")}
    assert of_users == {"values": 3, "unknown_values": 2}  # "nobody", and "u3", whom no step has met yet
    assert 0 < float(lines['jrec_trained_unknown_share{feature="item"}']) < 1
    assert [name for name in lines if version in name and name.startswith("jrec_export_info")]
    assert abs(float(lines["jrec_export_age_seconds"]) - state["age_seconds"]) < 5


# Deltas and other exports


def versions_of(served, count, expected, stop):
    """Asks until it is told to stop; every answer must have the scores of the version that it names."""
    seen, content = [], json.dumps({"rows": ROWS})
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    with contextlib.closing(connection):
        while not stop.is_set() or len(seen) < count:
            connection.request("POST", "/predict", content, {"Content-Type": JSON})
            response = connection.getresponse()
            body = json.loads(response.read())
            assert response.status == 200, body
            version = response.headers["X-Jrec-Version"]
            assert body["version"] == version
            np.testing.assert_allclose(body["scores"], expected[version], rtol=1e-5, err_msg=version)
            seen.append(version)
    return seen


def test_deltas_are_taken_under_load_and_no_answer_is_lost_or_mixed(folder, expected, tmp_path):
    first, second, third = expected.values()
    assert min(np.abs(first - second).max(), np.abs(second - third).max()) > 1e-4  # else mixed ones would not be seen
    with running(folder / "whole", tmp_path) as served, futures() as pool:
        stop = threading.Event()
        asking = [pool.submit(versions_of, served, 20, expected, stop) for _ in range(4)]
        try:
            for name in ("delta1", "delta2"):
                shutil.copytree(folder / name, tmp_path / name)
                status, _, body = ask(served.port, "/reload", method="POST")
                assert (status, json.loads(body)["taken"]) == (200, [str(tmp_path / name)])
        finally:
            stop.set()
        seen = [one.result() for one in asking]
        assert json.loads(ask(served.port, "/readyz")[2])["folder"] == str(tmp_path / "delta2")
    order = list(expected)
    for versions in seen:
        assert [order.index(version) for version in versions] == sorted(order.index(version) for version in versions)
    assert order[-1] in {versions[-1] for versions in seen}


def test_what_was_encoded_before_a_delta_is_not_scored_after_it(folder):
    """Table "user" grows: the delta may have given the rows of a request to other keys."""
    model = serving.load(folder / "whole", batch_sizes=SIZES)
    encoded = model.encoded(COLUMNS)
    np.testing.assert_array_equal(model.scored_of(encoded).scores, model(COLUMNS))
    assert encoded.nbytes > 0
    model.apply(folder / "delta1")
    with pytest.raises(OutdatedError, match="took over a delta while the request waited; send it again"):
        model.scored_of(encoded)
    np.testing.assert_array_equal(model.scored_of(model.encoded(COLUMNS)).scores, model(COLUMNS))


def test_what_appears_is_found_without_being_asked_for(folder, expected, tmp_path):
    export, deltas = tmp_path / "export", tmp_path / "deltas"
    deltas.mkdir()
    export.symlink_to(folder / "whole")
    options = Options(max_rows=50, max_bytes=20_000, poll=0.05)
    with running(export, deltas, options=options) as served:
        shutil.copytree(folder / "delta1", deltas / "tuesday")

        def version_is(number):
            until = time.monotonic() + 30
            while json.loads(ask(served.port, "/readyz")[2])["version"] != list(expected)[number]:
                assert time.monotonic() < until
                time.sleep(0.02)

        version_is(1)
        shutil.copytree(folder / "whole", tmp_path / "next")
        reseal(tmp_path / "next", lambda content: content.update(run="another"))
        (tmp_path / "link").symlink_to(tmp_path / "next")
        (tmp_path / "link").rename(export)  # as `ln -sfn` does it, in one step
        until = time.monotonic() + 30
        while json.loads(ask(served.port, "/readyz")[2])["run"] != "another":
            assert time.monotonic() < until
            time.sleep(0.02)
        _, headers, body = ask(served.port, content={"rows": ROWS})
        assert headers["X-Jrec-Version"] not in expected
        np.testing.assert_allclose(json.loads(body)["scores"], next(iter(expected.values())), rtol=1e-5)


def test_a_delta_that_cannot_be_taken_changes_nothing_until_it_is_whole(folder, expected, tmp_path, capfd):
    options = Options(max_rows=50, max_bytes=20_000, poll=0.02)
    with running(folder / "whole", tmp_path, options=options) as served:
        shutil.copytree(folder / "delta1", tmp_path / "part", ignore=lambda at, names: ["user.npy"])
        status, _, body = ask(served.port, "/reload", method="POST")
        assert (status, json.loads(body)["kind"]) == (409, "reload")
        assert "user.npy is missing" in json.loads(body)["error"]
        time.sleep(0.2)  # some polls, which do not read it again
        assert ask(served.port, content={"rows": ROWS})[1]["X-Jrec-Version"] == next(iter(expected))
        assert b'jrec_takeovers_total{outcome="taken"} 0' in ask(served.port, "/metrics")[2]
        for path in (folder / "delta1").rglob("user.npy"):
            shutil.copy(path, tmp_path / "part" / path.relative_to(folder / "delta1"))
        until = time.monotonic() + 30
        while ask(served.port, content={"rows": ROWS})[1]["X-Jrec-Version"] != list(expected)[1]:
            assert time.monotonic() < until
    assert capfd.readouterr().err.count("not taken over") <= 3


def test_two_deltas_of_one_export_are_refused(folder, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(folder / "delta1", tmp_path / name)
    said: list[str] = []
    load = lambda path: serving.load(path, batch_sizes=SIZES)  # noqa: E731
    follower = Follower(folder / "whole", tmp_path, load=load, report=said.append)
    assert follower.folder == folder / "whole"  # what there is, is served
    assert re.search(r"not taken over: .*a and .*b all follow .* leave only one there", said[0])
    with pytest.raises(serving.ExportError, match=r"a and .*b all follow .* leave only one there"):
        follower.check()


def test_what_is_no_delta_is_passed_over(folder, tmp_path):
    for name in ("aaa", "zzz"):
        shutil.copytree(folder / "delta1", tmp_path / name)
        (tmp_path / name / "manifest.json").write_text("{" if name == "aaa" else '{"format": "another"}')
    said: list[str] = []
    load = lambda path: serving.load(path, batch_sizes=SIZES)  # noqa: E731
    follower = Follower(folder / "whole", tmp_path, load=load, report=said.append)
    assert [line.split(":")[0] for line in said] == [f"passes over {tmp_path / name}" for name in ("aaa", "zzz")]
    assert follower.check() == []
    assert len(said) == 2  # once, until it changes
    assert follower.passed_over.keys() == {str(tmp_path / "aaa"), str(tmp_path / "zzz")}
    shutil.copytree(folder / "delta1", tmp_path / "delta")
    assert follower.check(again=True) == [tmp_path / "delta"]
    assert len(said) == 2
    assert follower.passed_over.keys() == {str(tmp_path / "aaa"), str(tmp_path / "zzz")}


def test_a_delta_that_is_being_written_is_left_alone(folder, tmp_path):
    """Its manifest is there before its files are on the disk and it has its name."""
    follower = Follower(folder / "whole", tmp_path, load=lambda path: serving.load(path, batch_sizes=SIZES))
    for name in ("delta.partial", "delta.replaced"):
        shutil.copytree(folder / "delta1", tmp_path / name)
        assert follower.check() == []
    (tmp_path / "delta.partial").rename(tmp_path / "delta")
    assert follower.check() == [tmp_path / "delta"]


def test_a_follower_reads_what_failed_only_where_it_has_changed(folder, tmp_path, monkeypatch):
    follower = Follower(folder / "whole", tmp_path, load=lambda path: serving.load(path, batch_sizes=SIZES))
    shutil.copytree(folder / "delta1", tmp_path / "delta")
    (tmp_path / "delta" / "model.jax_export").write_bytes(b"damaged")
    for again in (False, True):
        with pytest.raises(serving.ExportError, match=r"model.jax_export is damaged"):
            follower.check(again=again)
    assert follower.check() == []
    shutil.copy(folder / "delta1" / "model.jax_export", tmp_path / "delta")
    assert follower.check() == [tmp_path / "delta"]
    assert follower.folder == tmp_path / "delta"


def test_a_file_that_comes_while_a_delta_is_read_makes_it_worth_another_try(folder, tmp_path, monkeypatch):
    follower = Follower(folder / "whole", tmp_path, load=lambda path: serving.load(path, batch_sizes=SIZES))
    shutil.copytree(folder / "delta1", tmp_path / "delta")
    (tmp_path / "delta" / "model.jax_export").write_bytes(b"half")
    apply = serving.Model.apply

    def slow(model, delta):
        try:
            apply(model, delta)
        finally:  # the copy goes on while the delta is read
            shutil.copy(folder / "delta1" / "model.jax_export", tmp_path / "delta")

    monkeypatch.setattr(serving.Model, "apply", slow)
    with pytest.raises(serving.ExportError, match=r"model.jax_export is damaged"):
        follower.check()
    assert follower.check() == [tmp_path / "delta"]


# The command


def test_mistakes_are_answered_before_jax_is_loaded(folder, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = str(taken.getsockname()[1])
        for arguments, message in (
            ([str(tmp_path / "none")], "none is not a folder"),
            ([str(folder / "delta1")], "is a delta; serve the export that it follows"),
            ([str(folder / "whole"), "--deltas", str(tmp_path / "none")], "--deltas .* is not a folder"),
            ([str(folder / "whole"), "--port", busy], f"--host 127.0.0.1 --port {busy} cannot be listened at"),
            ([str(folder / "whole"), "--host", "no.such.host.invalid"], "cannot be listened at"),
        ):
            assert cli.main(["serve", *arguments]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1
            assert re.search(message, lines[0]), lines
    code = (
        "import sys\nfrom jrec.cli import main\nassert main(sys.argv[1:]) == 2\n"
        "assert not {'jax', 'uvicorn', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
    )
    command = [sys.executable, "-c", code, "serve", str(folder / "delta1")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_without_the_extra_the_remedy_is_named(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["serve", str(folder / "whole")]) == 2
    assert "pip install 'jrec[serve]'" in capsys.readouterr().err


def is_listening(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


def test_sigterm_ends_it_after_what_was_accepted(folder):
    command = [sys.executable, "-m", "jrec", "serve", str(folder / "whole"), "--port", "0", "--max-batch", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, futures() as pool:
        try:
            said: list[str] = []
            while not said or " at http://" not in said[-1]:
                said.append(process.stderr.readline())
            assert re.search(r"reads .*whole and its checksums", said[0])
            assert said[1].endswith("compiles the model for batches of 1, 4 rows\n")
            port = int(re.search(r"at http://127.0.0.1:(\d+)", said[-1])[1])
            half = socket.create_connection(("127.0.0.1", port), timeout=30)
            content = json.dumps({"rows": ROWS}).encode()
            head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
            head += f"Content-Length: {len(content)}\r\n\r\n"
            half.sendall(head.encode() + content[:10])
            answers = [pool.submit(ask, port, content={"rows": ROWS}) for _ in range(8)]
            concurrent.futures.wait(answers)
            process.send_signal(signal.SIGTERM)
            assert "SIGTERM: answers what was accepted" in process.stderr.readline()
            until = time.monotonic() + 30
            while is_listening(port):
                assert time.monotonic() < until
                time.sleep(0.02)
            half.sendall(content[10:])
            assert b"200 OK" in half.recv(10_000)
            half.close()
            assert process.wait(30) == 0
            assert {answer.result()[0] for answer in answers} == {200}
            assert "ended: of 9 requests 9 were answered with scores, 0 by 503, 0 by" in process.stderr.read()
        finally:
            process.kill()


def test_the_dockerfile_starts_the_command():
    """Docker itself is not run: that its command is one that `jrec serve` takes is checked."""
    text = (ROOT / "examples" / "serve" / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    (arguments,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    name, command, *options = json.loads(entry) + json.loads(arguments)
    assert (name, command) == ("jrec", "serve")
    from jrec.app.commands import serve

    (line,) = [one for one in cli.COMMANDS if one.name == "serve"]
    assert cli.command_parser(line, serve).parse_args(options).port == 8501


def test_the_requests_of_the_page_are_answered(port):
    """Those of curl are sent without it; the program runs as it is, but for the port."""
    text = (ROOT / "docs" / "serve.md").read_text()
    shown = re.findall(r"-d '(\{.*\})'", text)
    assert len(shown) == 2
    for content in shown:
        assert len(json.loads(ask(port, content=content)[2])["scores"]) == 1
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(snippet.replace("8501", str(port)), "serve.md", "exec"), names)
    assert len(names["version"]) == 12
    assert ((names["scores"].to_numpy() > 0) & (names["scores"].to_numpy() < 1)).all()
