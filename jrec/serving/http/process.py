"""The process of ``jrec serve``: its socket, its signals, and its way to the end."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from jrec import signals
from jrec.errors import ConfigError, JrecError
from jrec.serving.http.app import Options, Server
from jrec.serving.http.batcher import Batcher, Limits
from jrec.serving.http.follower import Follower
from jrec.serving.http.metrics import Metrics
from jrec.serving.http.protocol import BoundedProtocol, ConnectionLimits
from jrec.serving.model import BATCH_SIZES, Model, load

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than proxies keep theirs (60), so that they end it."""


class _Uvicorn(uvicorn.Server):
    """uvicorn with the command's signals: their echoes are not counted, and they end in exit code 0."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], refusal: Callable[[], threading.Timer]):
        super().__init__(config)
        self._on_start, self._refusal = on_start, refusal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        refusal = self._refusal()
        refusal.start()
        try:
            await super().shutdown(sockets)
        finally:
            refusal.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals reach only that one
            yield
            return

        def respond(number: signal.Signals) -> None:
            if self.should_exit:
                signals.interrupt(signals.Interrupted("ended before all requests were answered", number))
            self.should_exit = True
            signals.say(f"{number.name}: answers what was accepted, then ends")

        before = signals.answer(respond)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def ready_model(
    folder: pathlib.Path,
    *,
    check: bool,
    batch_rows: int,
    threads: int | None,
    history_cache: int = 0,
    report: Callable[[str], None] = lambda message: None,
) -> Model:
    """Loads an export, and compiles all that requests need; says so, since it takes a while.

    Raises:
      ExportError: If it cannot be loaded.
      ConfigError: If the model's outputs are not one logit an example, or one a task.
    """
    sizes = {*(size for size in BATCH_SIZES if size < batch_rows), batch_rows}
    report(f"reads {folder}{' and its checksums' if check else ''}")
    model = load(folder, check=check, batch_sizes=sorted(sizes), threads=threads, history_cache=history_cache)
    try:
        model.check_answers()
    except ValueError as problem:
        raise ConfigError(f"{folder} cannot be served: {problem} in a program of your own") from problem
    each = "histories" if model.history_cache else f"batches of {', '.join(f'{size:,}' for size in sorted(sizes))} rows"
    report(f"compiles the model for {each}")
    model.warm_up()
    with contextlib.suppress(JrecError, ValueError):  # it is for what the first request would import and load
        nothing = {name: [""] for name in model.raw_columns}  # a missing value of every kind of column
        model.answer(model.encoded(nothing), 1)
    return model


def make(follower: Follower, limits: Limits, options: Options, report: Callable[[str], None] = signals.say) -> Server:
    """A server of what a follower has loaded, and will load."""
    metrics = Metrics()
    return Server(Batcher(lambda: follower.model, limits, metrics), follower, metrics, options, report)


def http_server(
    server: Server,
    *,
    grace: int,
    on_start: Callable[[], None] = lambda: None,
    connections: ConnectionLimits | None = None,
) -> uvicorn.Server:
    """A server that answers requests until SIGTERM or SIGINT, and then all that were accepted.

    Args:
      server: What answers.
      grace: The most seconds that it waits for them; after three quarters those that still wait are answered by 503.
      on_start: Called once connections are accepted.
      connections: What connections may be.
    """
    config = uvicorn.Config(
        server.app,
        http=functools.partial(BoundedProtocol, connections or ConnectionLimits()),  # pyright: ignore[reportArgumentType]
        access_log=False,
        date_header=False,
        lifespan="on",
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=KEEP_ALIVE,
        ws="none",
    )
    return _Uvicorn(config, on_start, lambda: threading.Timer(grace * 0.75, server.refuse))
