"""``jrec serve`` under load: latency of one-row requests at given rates, and requests while a delta is applied.

A DLRM of configs/criteo_kaggle.toml, trained for a few steps on the Kaggle sample, is exported and served by a process
of its own on loopback; this process is the client, on the same cores. Requests have 39 raw values in JSON, and are sent
in an open loop: each at its time, and its latency counts from then. The delta is trained from the same run. While it is
applied, each answer's scores are compared with those of the version that its header names.

--hostile SECONDS sends good requests twice: beside nobody, and for that long beside some fifty clients that send bad
rows, 8 MiB bodies, bytes of no protocol, headers without end or a byte a second, or leave (``hostile_clients``). The
server's memory, its probes and its own last message are watched meanwhile.

Examples:
  python -m benchmarks.serve_load
  python -m benchmarks.serve_load --rates 100 500 --seconds 30 --out results.json
  python -m benchmarks.serve_load --hostile 600
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks import harness
from benchmarks.accuracy import CONFIG, SAMPLE, run_jrec
from benchmarks.open_loop import Answer, fire, post

ROWS = 64  # different requests
DELTA_REQUESTS, DELTA_RATE = 10_000, 500
SOAK_RATE = 100
GROWTH = 64 << 20  # bytes that the server may take more at the end than after a tenth of the time
TOLERANCE = 1e-6  # batches of different sizes sum in different orders


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    if not arguments.input.is_file():
        raise SystemExit(f"serve_load: {arguments.input} is no file; name a Criteo Kaggle log with --input")
    with harness.Report(arguments, "serve_load") as report, tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _exports(folder, arguments.input, steps=60 if report.quick else 200)
        rows = _rows(arguments.input, ROWS)
        if arguments.hostile:
            _soak(report, folder, rows, arguments.hostile)
            return
        requests = [post("/predict", json.dumps({"rows": [row]}).encode()) for row in rows]
        seconds = 2 if report.quick else arguments.seconds
        with _served(folder) as (port, _):
            asyncio.run(fire(port, requests, count=200, rate=100))
            for rate in arguments.rates:
                answers = asyncio.run(fire(port, requests, count=int(rate * seconds), rate=rate))
                _report_rate(report, f"{rate:,} requests/s of one row, {seconds} s", answers)
            count = 1000 if report.quick else DELTA_REQUESTS
            answers, applied = asyncio.run(_with_delta(port, requests, folder, count))
        _report_delta(report, folder, rows, answers, applied)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--input", type=pathlib.Path, default=SAMPLE, help="a log in Criteo Kaggle's format")
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 1000], metavar="N", help="requests/s")
    parser.add_argument("--seconds", type=int, default=15, metavar="N", help="how long each rate goes on (15)")
    parser.add_argument("--hostile", type=int, default=0, metavar="SECONDS", help="beside hostile clients, so long")
    return parser


def _exports(folder: pathlib.Path, log: pathlib.Path, *, steps: int) -> None:
    """Writes ``whole`` and ``delta``, which follows it."""
    run_jrec("prepare", "criteo-kaggle", "--input", str(log), "--out", str(folder / "data"), "--quiet")
    common = [f"data.path={folder / 'data'}", "log.progress=off", "evaluate.baselines=off", f"max_steps={steps}"]
    first, second = folder / "run1", folder / "run2"
    run_jrec("train", str(CONFIG), *common, f"out={first}")
    run_jrec("export", str(first), "--out", str(folder / "whole"), "--quiet")
    run_jrec("train", str(CONFIG), *common, f"out={second}", f"init_from={first}")
    run_jrec("export", str(second), "--since", str(folder / "whole"), "--out", str(folder / "delta"), "--quiet")
    (folder / "deltas").mkdir()


def _rows(log: pathlib.Path, count: int) -> list[dict[str, str]]:
    names = [*(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))]
    with gzip.open(log, "rt") if log.suffix == ".gz" else log.open() as file:
        lines = [next(file).rstrip("\n").split("\t")[1:] for _ in range(count)]
    return [dict(zip(names, line, strict=True)) for line in lines]


@contextlib.contextmanager
def _served(folder: pathlib.Path) -> Iterator[_Served]:
    """A server of ``whole``, which looks for deltas only when it is asked to."""
    options = ["--port", "0", "--deltas", str(folder / "deltas"), "--poll", "0", "--timeout", "10"]
    command = [sys.executable, "-m", "jrec", "serve", str(folder / "whole"), *options]
    with (folder / "said").open("w+") as said, subprocess.Popen(command, stderr=said, text=True) as process:
        try:
            while (found := re.search(r"at http://127\.0\.0\.1:(\d+)", (folder / "said").read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"serve_load: jrec serve did not start: {(folder / 'said').read_text()}")
                time.sleep(0.05)
            # A collector's pass over all that this process, the client, has imported keeps it from sending for 0.2 s.
            gc.collect()
            gc.freeze()
            yield _Served(int(found[1]), process.pid)
            process.send_signal(signal.SIGTERM)
            if code := process.wait(60):
                raise SystemExit(f"serve_load: jrec serve ended with status {code}")
        finally:
            process.kill()


class _Served(NamedTuple):
    port: int
    pid: int


def _soak(report: harness.Report, folder: pathlib.Path, rows: Sequence[dict[str, str]], seconds: int) -> None:
    """Good requests beside nobody and beside hostile clients."""
    from jrec import serving

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    expected = serving.load(folder / "whole")(columns)
    requests = [post("/predict", json.dumps({"rows": [row]}).encode()) for row in rows]
    case = f"{SOAK_RATE} requests/s of one row"
    with _served(folder) as served:
        asyncio.run(fire(served.port, requests, count=200, rate=SOAK_RATE))
        alone = asyncio.run(fire(served.port, requests, count=SOAK_RATE * min(seconds, 60), rate=SOAK_RATE))
        with _hostile(folder, served.port, rows) as hostile:
            answers, memory = asyncio.run(_watched(served, requests, seconds))
    _report_rate(report, f"{case}, beside nobody", alone)
    _report_rate(report, f"{case}, beside hostile clients for {seconds} s", answers)
    case = f"beside hostile clients for {seconds} s"
    tails = [np.percentile([a.latency for a in each if a.status == 200], 99) for each in (alone, answers)]
    report.add(case, "p99 of good requests, times that beside nobody", tails[1] / tails[0], "ratio")
    wrong = sum(
        not np.allclose(json.loads(a.body)["scores"], expected[a.number % len(rows)], rtol=0, atol=TOLERANCE)
        for a in answers
        if a.status == 200
    )
    report.add(case, "wrong scores", wrong, "count")
    report.add(case, "probes of /healthz, greatest", 1e3 * max(hostile["healthz"]), "ms")
    first = memory[len(memory) // 10 :]  # what the first of each kind needs once is there then
    report.add(case, "resident memory, at the beginning", memory[0] / 2**20, "MiB")
    report.add(case, "resident memory, greatest", max(memory) / 2**20, "MiB")
    report.add(case, "resident memory, end less a tenth of the time", (memory[-1] - first[0]) / 2**20, "MiB")
    statuses = hostile["answers"]
    report.add(case, "answers to hostile clients", sum(statuses.values()), "count", details={"statuses": statuses})
    said = (folder / "said").read_text()
    traces, lost = said.count("Traceback"), _lost(said)
    report.add(case, "traces in the server's log", traces, "count")
    report.add(case, "requests that were not answered, by the server's last message", lost, "count")
    if wrong or traces or lost or memory[-1] - first[0] > GROWTH:
        raise SystemExit(
            f"serve_load: {wrong} wrong scores, {traces} traces, {lost} requests without an answer, and"
            f" {(memory[-1] - first[0]) / 2**20:.0f} MiB more at the end; there should be none, and at most"
            f" {GROWTH >> 20} MiB"
        )


def _lost(said: str) -> int:
    found = re.search(r"ended: of [\d,]+ requests .* and ([\d,]+) not at all", said)
    if found is None:
        raise SystemExit(f"serve_load: jrec serve did not say how it ended: {said[-1000:]}")
    return int(found[1].replace(",", ""))


@contextlib.contextmanager
def _hostile(folder: pathlib.Path, port: int, rows: Sequence[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Hostile clients; what came back to them is there at the end."""
    (folder / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-m", "benchmarks.hostile_clients", str(port), str(folder / "rows.json")]
    came: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            time.sleep(2)  # until they have begun
            yield came
            process.terminate()
            came |= json.loads(process.communicate(timeout=60)[0])
        finally:
            process.kill()


async def _watched(served: _Served, requests: Sequence[bytes], seconds: int) -> tuple[list[Answer], list[int]]:
    """Answers to good requests, and the server's resident bytes every second."""
    memory: list[int] = []

    async def watch() -> None:
        while True:
            memory.append(psutil.Process(served.pid).memory_info().rss)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    answers = await fire(served.port, requests, count=SOAK_RATE * seconds, rate=SOAK_RATE)
    watching.cancel()
    return answers, memory


async def _with_delta(
    port: int, requests: Sequence[bytes], folder: pathlib.Path, count: int
) -> tuple[list[Answer], Answer]:
    """Answers to requests, and to the reload in their midst that applies the delta."""

    async def reload() -> Answer:
        await asyncio.sleep(0.4 * count / DELTA_RATE)
        shutil.copytree(folder / "delta", folder / "deltas" / "delta")
        return (await fire(port, [post("/reload", b"")], count=1, rate=1))[0]

    answers, applied = await asyncio.gather(fire(port, requests, count=count, rate=DELTA_RATE), reload())
    if applied.status != 200:
        raise SystemExit(f"serve_load: the delta was not applied: {applied.body.decode()}")
    return answers, applied


def _report_rate(report: harness.Report, case: str, answers: Sequence[Answer]) -> None:
    milliseconds = 1e3 * np.array([answer.latency for answer in answers if answer.status == 200])
    if not milliseconds.size:
        raise SystemExit(f"serve_load: {case}: no request was answered by 200")
    for name, value in (("p50", 50), ("p99", 99), ("greatest", 100)):
        report.add(case, f"latency, {name}", np.percentile(milliseconds, value), "ms")
    behind = max(answer.sent - answer.due for answer in answers)
    report.add(case, "client behind its times, greatest", 1e3 * behind, "ms")
    report.add(case, "answered", milliseconds.size / (max(a.done for a in answers) - answers[0].due), "requests/s")
    statuses = Counter(answer.status for answer in answers)
    report.add(
        case,
        "not answered by 200",
        len(answers) - statuses[200],
        "count",
        details={"statuses": {str(code): n for code, n in statuses.items()}},
    )
    report.add(case, "load average of one minute, on all cores", os.getloadavg()[0], "count")


def _report_delta(
    report: harness.Report,
    folder: pathlib.Path,
    rows: Sequence[dict[str, str]],
    answers: Sequence[Answer],
    applied: Answer,
) -> None:
    case = f"{len(answers):,} requests of one row, {DELTA_RATE} a second, a delta applied meanwhile"
    _report_rate(report, case, answers)
    expected = _expected(folder, rows)
    versions, mixed = Counter[str](), 0
    for answer in answers:
        if answer.status == 200:
            version = answer.headers["x-jrec-version"]
            versions[version] += 1
            scores = json.loads(answer.body)["scores"]
            mixed += not np.allclose(scores, expected[version][answer.number % len(rows)], rtol=0, atol=TOLERANCE)
    report.add(case, "delta, from request to applied", 1e3 * applied.latency, "ms")
    report.add(case, "answers of another version than their header's", mixed, "count")
    for name, version in zip(("before", "after"), expected, strict=True):
        report.add(case, f"answers by the export {name}", versions[version], "count")


def _expected(folder: pathlib.Path, rows: Sequence[dict[str, str]]) -> dict[str, np.ndarray]:
    """Scores of rows by version: of the export, and with the delta."""
    from jrec import serving

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    model = serving.load(folder / "whole")
    before = {model.manifest.id[:12]: model(columns)}
    model.apply(folder / "delta")
    after = model(columns)
    (old,) = before.values()
    if np.isclose(old, after, rtol=0, atol=10 * TOLERANCE).any():
        raise SystemExit("serve_load: the delta leaves a score as it was, so that versions could not be told apart")
    return {**before, model.manifest.id[:12]: after}


if __name__ == "__main__":
    main()
