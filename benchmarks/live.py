"""What learning from a log as it comes is worth, and how soon the served model knows (docs/follow.md).

The first half of a log in order of time trains a model; the second half comes in files, as `jrec follow` takes them.
Every file is scored before anyone learns from it: by the model that follows, by the one that stays as it was (frozen),
and by one that is trained anew on all lines before, every so many files (trained again). Figures are means over all
files, by their examples, and do not depend on the machine.

``--part latency`` starts `jrec serve` and `jrec follow` beside it, gives files one by one, and waits until the server
answers by a model that has learnt from each: seconds from a file's name to another answer.

Examples:
  python -m benchmarks.live
  python -m benchmarks.live --log kaggle --part learn
  python -m benchmarks.live --part latency --out latency.jsonl
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import harness, quality_logs

CONFIG = """
epochs = {epochs}
[data]
batch_size = 512
window_blocks = 64
[model]
embedding_dim = 16
bottom_mlp = [32, 16]
top_mlp = [64, 32, 1]
[optimizer]
name = "adagrad"
learning_rate = 0.02
[optimizer.embedding]
name = "rowwise_adagrad"
learning_rate = 0.05
[tables.growth]
capacity = 40000
admit_after = 2
[evaluate]
every_steps = 0
final_splits = []
baselines = "off"
[log]
tensorboard = false
progress = "off"
"""
LOGS = {"kaggle": (5_000, 2), "flights": (7_000, 4)}
"""By log the lines of a file, and after how many files the model is trained again."""
METRICS = ("log_loss", "auc", "calibration")
FILES = 40  # of the latency
_DEADLINE = 120  # seconds for a file


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--log", nargs="+", choices=tuple(LOGS), default=list(LOGS), help="default: all")
    parser.add_argument("--part", nargs="+", choices=("learn", "latency"), default=["learn", "latency"])
    parser.add_argument("--packages", type=pathlib.Path, default=quality_logs.PACKAGES, help="see quality_logs")
    arguments = parser.parse_args()
    with harness.Report(arguments, "live") as report, tempfile.TemporaryDirectory() as folder:
        for name in arguments.log[:1] if arguments.quick else arguments.log:
            try:
                log = Log(name, pathlib.Path(folder) / name, arguments.packages, quick=arguments.quick)
            except quality_logs.AbsentError as absent:
                report.note(f"{name} skipped: {absent}")
                continue
            if "learn" in arguments.part:
                learn(report, log)
            if "latency" in arguments.part:
                latency(report, log, 3 if arguments.quick else FILES)


class Log:
    """A log in order of time, whose first half is one file, and the second ``files``."""

    def __init__(self, name: str, folder: pathlib.Path, packages: pathlib.Path, *, quick: bool):
        folder.mkdir()
        self.name, self.folder = name, folder
        places = quality_logs.Places(packages=packages, work=folder)
        given = quality_logs.LOGS[name].arguments(places)
        source = pathlib.Path(given[given.index("--input") + 1])
        self.options = [one for one in given[1:] if one not in ("--input", str(source))]
        with gzip.open(source, "rt") if source.suffix == ".gz" else source.open(encoding="utf-8") as file:
            lines = file.read().splitlines()
        self.head = [] if name == "kaggle" else [lines.pop(0)]
        if self.head:
            at = self.head[0].split(",").index("at")
            lines.sort(key=lambda line: line.split(",")[at])
        size, self.again = LOGS[name]
        lines = lines[: 6 * size] if quick else lines
        middle = len(lines) // 2
        self.first, rest = lines[:middle], lines[middle:]
        self.files = [list(lines) for lines in itertools.batched(rest, size)]

    def write(self, path: pathlib.Path, lines: Sequence[str]) -> pathlib.Path:
        """Writes lines with the log's header."""
        path.write_text("\n".join([*self.head, *lines]) + "\n", encoding="utf-8")
        return path

    def trained(self, name: str, lines: Sequence[str]) -> pathlib.Path:
        """A run that is trained on lines alone; its dataset lies at ``data_NAME``."""
        log = self.write(self.folder / f"{name}.csv", lines)
        data, run, config = self.folder / f"data_{name}", self.folder / name, self.folder / "run.toml"
        config.write_text(CONFIG.format(epochs=1 if self.name == "kaggle" else 2), encoding="utf-8")
        options = ["--split", "1,0,0", "--growing", "all", "--quiet"]
        jrec("prepare", *self.options, "--input", log, "--out", data, *options)
        jrec("train", config, f"data.path={data}", f"out={run}")
        return run

    def scored(self, run: pathlib.Path, files: Sequence[Sequence[str]]) -> Iterator[dict[str, float]]:
        """The metrics of files by a run as it is."""
        from jrec.app.evaluate import restore_run
        from jrec.metrics import Scores, evaluate

        log = self.write(self.folder / "scored.csv", [line for lines in files for line in lines])
        data = self.folder / "data_scored"
        options = ["--vocabulary-from", run.with_name(f"data_{run.name}"), "--split", "0,0,1", "--overwrite", "--quiet"]
        jrec("prepare", *self.options, "--input", log, "--out", data, *options)
        scores = restore_run(run, data).scores("test")
        assert isinstance(scores, Scores)
        ends = np.cumsum([len(lines) for lines in files]).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            yield evaluate(Scores(logits=scores.logits[start:stop], labels=scores.labels[start:stop])).to_dict()


def learn(report: harness.Report, log: Log) -> None:
    """The means of all files, by each way."""
    run = log.trained("first", log.first)
    incoming = log.folder / "incoming"
    incoming.mkdir()
    for number, lines in enumerate(log.files):
        log.write(incoming / f"part-{number}.csv", lines)
    live = log.folder / "live"
    jrec("follow", run, "--input", incoming, "--out", live, "--once", "--settle", 0, "--every", 1e6)
    records = [json.loads(line) for line in (live / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    again: list[dict[str, float]] = []
    for start in range(0, len(log.files), log.again):
        before = [*log.first, *itertools.chain.from_iterable(log.files[:start])]
        anew = log.trained(f"again{start}", before) if start else run
        again += log.scored(anew, log.files[start : start + log.again])
    ways = {
        "followed": [record for record in records if record["split"] == "progressive"],
        "frozen": [*log.scored(run, log.files)],
        f"trained again every {log.again} files": again,
    }
    for way, scored in ways.items():
        weights = [len(lines) for lines in log.files]
        for metric in METRICS:
            unit = {"log_loss": "nats per example", "auc": "auc"}.get(metric, "mean prediction / click rate")
            mean = float(np.average([one[metric] for one in scored], weights=weights))
            report.add(f"{log.name}, {way}", metric, mean, unit, details={"files": len(log.files)})


def latency(report: harness.Report, log: Log, files: int) -> None:
    """Seconds from a file's name to an answer of a model that has learnt it."""
    run, incoming = log.trained("served", log.first), log.folder / "arriving"
    incoming.mkdir()
    export, deltas = log.folder / "export", log.folder / "deltas"
    jrec("export", run, "--out", export, "--quiet")
    deltas.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = start("serve", export, "--deltas", deltas, "--poll", 0.1, "--port", port)
    given = ["--export", export, "--deltas", deltas, "--every", 0, "--poll", 0.1, "--settle", 0]
    follow = start("follow", run, "--input", incoming, "--out", log.folder / "served_live", *given)
    try:
        seconds, version = [], wait_for(port, "")
        for number in range(files):
            part = log.files[number % len(log.files)][:1_000]
            written = log.write(log.folder / "next.csv", part)
            begin = time.perf_counter()
            written.rename(incoming / f"part-{number}.csv")
            version = wait_for(port, version)
            seconds.append(time.perf_counter() - begin)
    finally:
        for process in (follow, serve):
            process.terminate()
            process.wait(timeout=60)
    waited = np.array(seconds[1:])  # the first compiles
    for share in (50, 99):
        name = f"file of 1,000 lines to a served answer, p{share}"
        report.add(log.name, name, float(np.percentile(waited, share)), "s", details={"files": len(waited)})


def wait_for(port: int, before: str) -> str:
    """The version that a server answers by, once it is another one."""
    end = time.monotonic() + _DEADLINE
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metadata", timeout=10) as answer:
                content = json.loads(answer.read())
                version = str(content.get("version") or content.get("versions"))
                if version != before:
                    return version
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.02)
    raise SystemExit(f"the server answered by no other model than {before or 'none'!r} within {_DEADLINE} s")


def jrec(*arguments: object) -> None:
    """Runs a command."""
    command = [sys.executable, "-m", "jrec", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command[2:])}` ended with status {done.returncode}:\n{done.stderr}")


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """Starts a command."""
    command = [sys.executable, "-m", "jrec", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
