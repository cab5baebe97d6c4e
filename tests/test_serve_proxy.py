"""The proxy that docs/serve.md puts in front of `jrec serve`: its example, run by a real nginx with a real server."""

import base64
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
import types

import pytest
from export_cases import made_exports
from test_serve import COLUMNS, JSON, ROWS, ask

ROOT = pathlib.Path(__file__).parents[1]
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"ann:secret").decode()}
HOST = "scores.example.com"
CONFIG = """
user root;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{example}
}}
"""


NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:{ROOT / 'build' / 'nginx' / 'usr' / 'sbin'}")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is neither installed, nor unpacked into build/nginx as by .ci/run"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes certificates, is not installed"),
]


def example():
    (block,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "serve.md").read_text(), re.DOTALL)
    return block


def placed(text, replacements):
    """The text with other places, each of which stands in it once."""
    for there, here in replacements.items():
        assert text.count(there) == 1, f"{there!r} stands {text.count(there)} times in docs/serve.md's example"
        text = text.replace(there, here)
    return text


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextlib.contextmanager
def server_of(export):
    """`jrec serve` of an export; gives its port."""
    command = [sys.executable, "-m", "jrec", "serve", str(export), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (at := re.search(r" at http://127\.0\.0\.1:(\d+)", said)):
                said = process.stderr.readline()
                assert said, "the server ended"
            yield int(at[1])
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextlib.contextmanager
def proxy_to(port, folder):
    """The page's nginx in front of that port; gives its own port and the certificate to trust."""
    certificate, key, passwords = folder / "scores.pem", folder / "scores.key", folder / "scores.passwd"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    made += ["-addext", f"subjectAltName=DNS:{HOST}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    passwords.write_text("ann:{PLAIN}secret\n")
    chosen = free_port()
    replacements = {
        "listen 443 ssl": f"listen 127.0.0.1:{chosen} ssl",
        "/etc/ssl/scores.pem": str(certificate),
        "/etc/ssl/scores.key": str(key),
        "/etc/nginx/scores.passwd": str(passwords),
        "http://127.0.0.1:8501": f"http://127.0.0.1:{port}",
    }
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, example=placed(example(), replacements)))
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until = time.monotonic() + 30
            while not (folder / "nginx.pid").is_file() or not (folder / "nginx.pid").read_text():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < until
                time.sleep(0.02)
            yield types.SimpleNamespace(port=chosen, certificate=certificate)
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    made_exports(folder, deltas=())
    with server_of(folder / "whole") as port, proxy_to(port, folder) as proxy:
        proxy.server = port
        yield proxy


@contextlib.contextmanager
def connected(proxy):
    """A connection to the proxy, which is trusted by its certificate."""
    trusting = ssl.create_default_context(cafile=str(proxy.certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", proxy.port, timeout=60, context=trusting)
    connection.sock = trusting.wrap_socket(
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60), server_hostname=HOST
    )
    with contextlib.closing(connection):
        yield connection


def through(proxy, path="/predict", body=None, method="POST", **headers):
    """A request through the proxy: its status and body."""
    content = json.dumps({"rows": ROWS}).encode() if body is None else body
    given = {"Host": HOST, "Content-Type": JSON, **headers}
    with connected(proxy) as connection:
        connection.request(method, path, content if method == "POST" else None, given)
        response = connection.getresponse()
        return response.status, response.read()


def answered(proxy):
    """How many requests the server itself has answered, whatever came of them."""
    lines = ask(proxy.server, "/metrics")[2].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("jrec_requests_total{"))


def test_a_good_request_has_the_scores_of_one_without_a_proxy(both):
    status, _, direct = ask(both.server, content={"columns": COLUMNS})
    assert status == 200
    status, body = through(both, **LOGIN)
    assert status == 200
    assert json.loads(body) == json.loads(direct)


@pytest.mark.parametrize("login", [{}, {"Authorization": "Basic " + base64.b64encode(b"ann:other").decode()}])
def test_nobody_is_answered_without_a_login(both, login):
    before = answered(both)
    assert through(both, **login)[0] == 401
    assert answered(both) == before


def test_a_body_that_is_too_large_ends_at_the_proxy(both):
    before = answered(both)
    assert through(both, body=b" " * ((8 << 20) + 1), **LOGIN)[0] == 413
    assert answered(both) == before


def test_another_host_is_refused(both):
    before = answered(both)
    assert through(both, Host="rebound.example.org", **LOGIN)[0] == 421
    assert answered(both) == before


@pytest.mark.parametrize("path", ["/metrics", "/reload", "/metadata", "/healthz", "/readyz", "/predict/../reload", "/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_else_is_reached(both, path, method):
    before = answered(both)
    status, body = through(both, path=path, method=method, **LOGIN)
    assert status in (403, 404, 405)
    assert b"nginx" in body  # its own answer, and not the server's
    assert answered(both) == before


def test_a_client_that_asks_too_often_is_slowed(both):
    """100 requests a second, and 200 more at once. Without a login, which is looked at after the rate."""
    request, count = f"GET /predict HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(), 500
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answers = b""
    with connected(both) as connection:
        connection.sock.sendall(request * (count - 1) + last)
        while part := connection.sock.recv(1 << 16):
            answers += part
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)]
    assert len(statuses) == count
    assert statuses[:200] == [401] * 200
    assert set(statuses) == {401, 503}
