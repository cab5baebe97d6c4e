"""``jrec serve``: an exported model behind HTTP, which takes over deltas and new exports while it answers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import ipaddress
import pathlib
import socket

from jrec.app.commands.arguments import COUNT, THREADS, integer, number, size

DESCRIPTION = """\
Serve an exported model over HTTP.

EXPORT is a folder that `jrec export` made. POST /predict takes raw values as JSON, {"rows": [{"user": "u17", ...}]} or
{"columns": {"user": ["u17"], ...}}, or as an Arrow stream (application/vnd.apache.arrow.stream), and answers with a
score for each row in the same form; the header X-Jrec-Version names the export that computed all of them. GET /healthz
and /readyz are for probes, GET /metrics for Prometheus, GET /metadata says what columns a request has.

Requests that wait are scored together, up to --max-batch rows, by one thread. Once --max-queue rows wait, further
requests are answered by 503. A delta that appears in the folder --deltas and follows what is served is applied, and
EXPORT is loaded anew where another export is there (--overwrite, or a link that leads to another folder): every --poll
seconds, or by POST /reload at once. SIGTERM and SIGINT end the server after it has answered what it accepted.

Needs pip install 'jrec[serve]'. There is no TLS and no login: beyond this machine, put a proxy in front."""
EPILOG = """examples:
  jrec serve exports/monday
  curl localhost:8501/predict -H 'Content-Type: application/json' -d '{"rows": [{"user": "u1", "price": 3}]}'
  jrec serve exports/clicks --deltas exports/clicks_deltas --poll 10
  jrec serve exports/clicks --host 0.0.0.0 --port 80 --max-batch 1024 --max-delay 2
"""
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
_BACKLOG = 1024  # connections that wait to be accepted
_NEEDED = ("uvicorn", "starlette", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("export", metavar="EXPORT", help="the folder of a whole export")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="listen at this address (127.0.0.1)")
    parser.add_argument(
        "--port", type=integer(0, 65535), default=8501, metavar="N", help="listen at this port (8501); 0: any free one"
    )
    parser.add_argument("--deltas", metavar="DIR", help="the folder in which deltas of the export appear")
    parser.add_argument(
        "--poll", type=number(0, 86400), default=5.0, metavar="SECONDS",
        help="look for deltas and another export so often (5); 0: only at POST /reload",
    )  # fmt: skip
    parser.add_argument(
        "--max-batch", type=integer(1, 4096), default=256, metavar="N", help="score up to N rows together (256)"
    )
    parser.add_argument(
        "--max-delay", type=number(0, 1000), default=0.0, metavar="X",
        help="let the first request of a batch wait X ms for others where the model is idle (0)",
    )  # fmt: skip
    parser.add_argument("--max-queue", type=COUNT, default=8192, metavar="N", help="rows that may wait (8,192)")
    parser.add_argument("--max-rows", type=COUNT, default=4096, metavar="N", help="rows of a request (4,096)")
    parser.add_argument(
        "--max-body", type=size(1), default="8MiB", metavar="SIZE", help="bytes of a request's body (8MiB)"
    )
    parser.add_argument(
        "--max-values", type=COUNT, default=65536, metavar="N", help="values of a row in one column (65,536)"
    )
    parser.add_argument(
        "--max-scores", type=COUNT, default=1 << 24, metavar="N",
        help="of a model that ranks items: rows times items at once (16,777,216)",
    )  # fmt: skip
    parser.add_argument(
        "--max-memory", type=size(1), default="64MiB", metavar="SIZE",
        help="bytes of all requests together, from their first byte to their answer (64MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--history-cache", type=size(0), default="256MiB", metavar="SIZE",
        help="of HSTU and SASRec: bytes for what was computed of histories, so that an event more costs little"
        " (256MiB); 0: nothing is kept",
    )  # fmt: skip
    parser.add_argument("--max-connections", type=COUNT, default=1000, metavar="N", help="open connections (1,000)")
    parser.add_argument(
        "--timeout", type=number(0, 3600, above=True), default=30.0, metavar="SECONDS",
        help="answer a request that takes longer by 504, and close one whose headers or body take longer (30)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="answer only requests whose header Host has this name (repeatable); without one, at a loopback address"
        " those to localhost and loopback addresses, else all",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=integer(1, 3600), default=25, metavar="SECONDS",
        help="at the end, wait so long for requests that were accepted (25; Kubernetes kills after 30)",
    )  # fmt: skip
    parser.add_argument("--threads", type=THREADS, metavar="N", help="threads of lookups (default: all cores)")
    parser.add_argument(
        "--no-check", action="store_true",
        help="do not read the files of rows for their checksums, so that tables larger than memory start at once",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns 0."""
    from jrec.errors import ConfigError
    from jrec.optional_packages import remedy

    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"jrec serve needs {', '.join(missing)}: {remedy('serve')}")
    export, deltas = pathlib.Path(args.export), None if args.deltas is None else pathlib.Path(args.deltas)
    _check(export, deltas)
    with _bound(args.host, args.port) as listening:
        return _serve(args, export, deltas, listening)


def _check(export: pathlib.Path, deltas: pathlib.Path | None) -> None:
    """Refuses what cannot be served, before JAX is loaded.

    Raises:
      ExportError: If there is no whole export.
      ConfigError: If the folder of deltas is none.
    """
    from jrec.errors import ConfigError
    from jrec.serving.checks import read_manifest
    from jrec.serving.format import ExportError

    if read_manifest(export).follows:
        raise ExportError(f"{export} is a delta; serve the export that it follows, with --deltas {export.parent}")
    if deltas is not None and not deltas.is_dir():
        raise ConfigError(f"--deltas {deltas} is not a folder; give the one in which deltas of {export} appear")


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which nobody else can have then; 0 is any free port.

    Raises:
      ConfigError: If the address cannot be had.
    """
    from jrec.errors import ConfigError

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as failing:
            made = failing.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(_BACKLOG)  # only that keeps others from the address
            failing.pop_all()
    except (OSError, UnicodeError) as problem:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened at ({problem}); choose another address or port"
        ) from problem
    return made


def _serve(
    args: argparse.Namespace, export: pathlib.Path, deltas: pathlib.Path | None, listening: socket.socket
) -> int:
    from jrec import memory, signals
    from jrec.serving.http.app import Options, described
    from jrec.serving.http.batcher import Limits
    from jrec.serving.http.follower import Follower
    from jrec.serving.http.process import http_server, make, ready_model
    from jrec.serving.http.protocol import ConnectionLimits

    load = functools.partial(
        ready_model, check=not args.no_check, batch_rows=args.max_batch, threads=args.threads,
        history_cache=args.history_cache, report=signals.say,
    )  # fmt: skip
    follower = Follower(export, deltas, load=load, report=signals.say)
    limits = Limits(
        batch_rows=args.max_batch, delay=args.max_delay / 1e3, queue_rows=args.max_queue, scores=args.max_scores
    )
    host, port, *_ = listening.getsockname()
    local = _LOCAL if ipaddress.ip_address(host).is_loopback else ()
    options = Options(
        max_rows=args.max_rows, max_bytes=args.max_body, max_values=args.max_values, poll=args.poll,
        memory=args.max_memory, body_seconds=args.timeout, seconds=args.timeout,
        hosts=tuple(args.allow_host) or local,
    )  # fmt: skip
    server = make(follower, limits, options)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    message = f"serves {follower.folder}, {described(follower.model.manifest)}, at http://{address}"
    memory.started()
    connections = ConnectionLimits(connections=args.max_connections, header_seconds=args.timeout)
    http_server(server, grace=args.grace, on_start=lambda: signals.say(message), connections=connections).run(
        sockets=[listening]
    )
    signals.say(f"ended: {server.end}")
    return 0
