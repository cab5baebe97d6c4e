"""Clients of bad will, or of none: what they may cost is bounded, and those beside them are answered."""

import concurrent.futures
import contextlib
import gc
import http.client
import json
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from export_cases import SIZES, made_exports
from serve_cases import Fake
from test_serve import COLUMNS, JSON, ROWS, ask, running

from jrec import serving
from jrec.serving.http.app import Options
from jrec.serving.http.batcher import Limits
from jrec.serving.http.protocol import ConnectionLimits


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return made_exports(tmp_path_factory.mktemp("hostile"), deltas=()) / "whole"


def opened(port):
    return contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=30))


def received(connection):
    """All that comes until the other end closes."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            pieces.append(piece)
    return b"".join(pieces)


def head_of(length):
    return f"POST /predict HTTP/1.1\r\nHost: h\r\nContent-Type: {JSON}\r\nContent-Length: {length}\r\n\r\n".encode()


def quick(**changes):
    return Options(**{"max_rows": 50, "max_bytes": 200_000, "poll": 0, **changes})


LIMITS = ConnectionLimits(connections=4, header_bytes=2_000, header_seconds=0.5)


def test_headers_that_are_long_or_late_are_refused(export):
    with running(export, connections=LIMITS) as served:
        with opened(served.port) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
            for _ in range(10):
                with contextlib.suppress(OSError):
                    connection.sendall(b"x" * 1_000)
            assert received(connection).startswith(b"HTTP/1.1 431 ")
        for sent in (b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with opened(served.port) as connection:
                connection.sendall(sent)
                begin = time.monotonic()
                if sent.endswith(b"\r\n\r\n"):  # the next request's are late, whose first byte came
                    assert b"200 OK" in connection.recv(1_000)
                    connection.sendall(b"G")
                assert received(connection).startswith(b"HTTP/1.1 408 ")
                assert time.monotonic() - begin < 10
        assert ask(served.port, content={"rows": ROWS})[0] == 200


def test_connections_beyond_the_limit_are_told_to_come_again(export):
    with running(export, connections=ConnectionLimits(connections=4)) as served, contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(served.port)) for _ in range(4)]
        for connection in held:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(1_000)
        with opened(served.port) as connection:
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
        held[0].close()
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                if ask(served.port, "/healthz")[0] == 200:
                    break
            assert time.monotonic() < until


def test_a_body_that_does_not_come_is_not_waited_for(export):
    with running(export, options=quick(body_seconds=0.3)) as served, opened(served.port) as connection:
        connection.sendall(head_of(9) + b"{")
        answer = connection.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"1 bytes of the body came within 0.3 s" in answer


def test_bodies_are_counted_from_their_first_byte_to_their_answer(export):
    """Two requests whose bodies are half there: a third one is told to come again, and later has its scores."""
    with running(export, options=quick(memory=92_000)) as served:
        with opened(served.port) as one, opened(served.port) as other:
            for connection in (one, other):
                connection.sendall(head_of(150_000) + b"[" * 45_000)
            until = time.monotonic() + 20
            while b"jrec_request_bytes 90000.0" not in ask(served.port, "/metrics")[2]:
                assert time.monotonic() < until
            status, headers, body = ask(served.port, content={"rows": ROWS})
            assert (status, headers["Retry-After"], json.loads(body)["kind"]) == (503, "1", "queue_full")
            assert "requests take 90,000 bytes already, and at most 92,000 may" in json.loads(body)["error"]
        while ask(served.port, content={"rows": ROWS})[0] != 200:
            assert time.monotonic() < until


def test_a_large_body_has_the_scores_of_small_ones(export):
    """It is encoded by itself, beside the event loop."""
    model = serving.load(export, batch_sizes=SIZES)
    columns = {name: values * 12 for name, values in COLUMNS.items()}
    columns["history"] = [["i1"] * 600 + history[-2:] for history in columns["history"]]
    columns["strengths"] = [[1.0] * 600 + strengths[-2:] for strengths in columns["strengths"]]
    content = json.dumps({"columns": columns})
    assert len(content) > 100_000
    with running(export, options=quick(max_bytes=1_000_000)) as served:
        status, _, body = ask(served.port, content=content)
        assert status == 200
        np.testing.assert_array_equal(np.float32(json.loads(body)["scores"]), model(columns))
        columns["price"] = ["cheap"] * 36
        assert ask(served.port, content=json.dumps({"columns": columns}))[0] == 422
        assert b"jrec_request_bytes 0.0" in ask(served.port, "/metrics")[2]


@contextlib.contextmanager
def of(fake, **options):
    limits = Limits(batch_rows=4, delay=0, queue_rows=100)
    with running("x", load=lambda path: fake, limits=limits, options=quick(**options)) as served:
        yield served


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setattr("jrec.serving.http.follower.Follower._manifest", lambda self, folder: made.manifest)
    monkeypatch.setattr("jrec.serving.http.follower.Follower._now_serves", _serve)
    return made


def _serve(self, folder, model):
    self.model, self.folder, self._written = model, pathlib.Path(folder), 0.0


def test_a_request_that_takes_too_long_is_told_so(fake):
    with of(fake, seconds=0.3) as served:
        status, _, body = ask(served.port, content={"columns": {"x": [1]}})
        assert (status, json.loads(body)["kind"]) == (504, "deadline")
        assert ask(served.port, content={"columns": {"x": [2]}})[0] == 504  # it waited, and was never begun
        fake.go.set()
        assert ask(served.port, content={"columns": {"x": [3]}})[0] == 200
        assert fake.batches == [[1.0], [3.0]]


def test_an_error_that_comes_too_late_is_not_printed(fake, capfd):
    with of(fake, seconds=0.3) as served:
        assert ask(served.port, content={"columns": {"x": ["bad"]}})[0] == 504
        fake.go.set()
        assert ask(served.port, content={"columns": {"x": [3]}})[0] == 200
        gc.collect()
    assert "never retrieved" not in capfd.readouterr().err


def test_a_large_body_is_not_waited_for_without_end(fake):
    with of(fake, seconds=0.3) as served:
        content = json.dumps({"columns": {"x": [1] * 40}}) + " " * 20_000
        status, _, body = ask(served.port, content=content)
        assert (status, json.loads(body)["kind"]) == (504, "deadline")
        fake.go.set()


def test_requests_whose_clients_have_left_are_not_scored(fake):
    with of(fake) as served:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, served.port, content={"columns": {"x": [1]}})
            assert fake.begun.wait(30)
            with opened(served.port) as connection:
                content = b'{"columns": {"x": [2]}}'
                connection.sendall(head_of(len(content)) + content)
                until = time.monotonic() + 20
                while b"jrec_queue_requests 1.0" not in ask(served.port, "/metrics")[2]:
                    assert time.monotonic() < until
            while b'jrec_errors_total{kind="disconnected"} 1.0' not in ask(served.port, "/metrics")[2]:
                assert time.monotonic() < until
            fake.go.set()
            assert first.result(30)[0] == 200
        assert ask(served.port, content={"columns": {"x": [3]}})[0] == 200
    assert fake.batches == [[1.0], [3.0]]


def test_at_the_end_those_that_wait_get_503_in_time(fake):
    limits = Limits(batch_rows=1, delay=0, queue_rows=100)
    answers = concurrent.futures.ThreadPoolExecutor(5)
    with running("x", load=lambda path: fake, limits=limits, options=quick(), grace=2) as served:
        asked = [answers.submit(ask, served.port, content={"columns": {"x": [k]}}) for k in range(5)]
        until = time.monotonic() + 20
        while b"jrec_queue_requests 4.0" not in ask(served.port, "/metrics")[2]:
            assert time.monotonic() < until
        served.server.should_exit = True
        time.sleep(1.8)  # three quarters of the grace, and a little
        fake.go.set()
        statuses = sorted(one.result(30)[0] for one in asked)
        assert statuses == [200, 503, 503, 503, 503]
    assert served.made.end.startswith("of 5 requests 1 were answered with scores, 4 by 503, 0 by other errors,")


def test_other_hosts_and_forms_of_other_sites_do_nothing(export):
    with running(export, options=quick(hosts=("localhost", "127.0.0.1"))) as served:
        assert ask(served.port, "/healthz", Host="evil.example")[0] == 400
        assert ask(served.port, "/healthz", Host=f"localhost:{served.port}")[0] == 200
        assert ask(served.port, "/reload", method="POST", kind=None)[0] == 415
        assert ask(served.port, "/reload", method="POST", kind="text/plain")[0] == 415
        assert ask(served.port, "/reload", method="POST")[0] == 200


def test_metadata_says_what_a_request_has(export):
    with running(export) as served:
        said = json.loads(ask(served.port, "/metadata")[2])
    inputs = {one["name"]: (one["datatype"], one["shape"]) for one in said["inputs"]}
    assert inputs == {
        "price": ("FP32", [-1]), "user": ("BYTES", [-1]), "item": ("BYTES", [-1]), "history": ("BYTES", [-1, -1]),
        "strengths": ("FP32", [-1, -1]),
    }  # fmt: skip
    assert said["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    assert (said["platform"], len(said["versions"][0])) == ("jrec", 12)


def test_deep_and_odd_bodies_are_the_client_s_mistake(export):
    """None is a defect: no 500, and no trace in the log."""
    odd = [
        b"[" * 100_000, b'{"rows": ' + b"[" * 50_000, b'{"rows": [{"user": ' + b'{"a":' * 30_000,
        json.dumps({"rows": [{**ROWS[0], "history": "[" * 20_000}]}).encode(),
        json.dumps({"rows": [{**ROWS[0], "history": [[["i1"]]]}]}).encode(),
        b'{"rows": [{"user": 1e400}]}', b'{"rows": [' + b"9" * 5_000 + b"]}",
        json.dumps({"rows": [{**ROWS[0], "price": 3e38, "strengths": [3e38, 3e38]}]}).encode(),
        json.dumps({"rows": [{**ROWS[0], "user": 10**30}]}).encode(), b"\xff\xfe", b"null", b"", b"{}",
    ]  # fmt: skip
    with running(export, options=quick()) as served:
        for content in odd:
            status, _, body = ask(served.port, content=content)
            assert status in (200, 400, 413, 422), (content[:40], body[:200])
            if status == 200:
                assert np.isfinite(json.loads(body)["scores"]).all()
        assert ask(served.port, content={"rows": ROWS})[0] == 200


def test_two_at_one_port_are_not_both_told_that_they_serve(export):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "jrec", "serve", str(export), "--port", port, "--max-batch", "1"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        until, ended = time.monotonic() + 60, None
        while ended is None:
            assert time.monotonic() < until
            ended = next((one for one in processes if one.poll() is not None), None)
            time.sleep(0.05)
        assert ended.returncode == 2
        assert f"--port {port} cannot be listened at" in ended.stderr.read()
        (other,) = (one for one in processes if one is not ended)
        while "serves " not in other.stderr.readline():
            assert time.monotonic() < until
        assert ask(int(port), "/healthz")[0] == 200
    finally:
        for one in processes:
            one.kill()
            one.wait()
            one.stderr.close()
