"""Exports of a DLRM trained on real clicks: AUC by dtype, and latency by batch size beside PyTorch.

The log is prepared by `jrec prepare criteo-kaggle` and trained by configs/criteo_kaggle.toml. Each dtype's export
scores the test split. Latency is of rows and dense features in memory to logits, at each batch size: ``jrec.serving``
looks rows up natively and runs the exported program, PyTorch runs the same model with EmbeddingBag in inference mode;
their logits are compared first. "Raw columns to scores" begins with texts, as a request does.

Examples:
  python -m benchmarks.serving
  python -m benchmarks.serving --input train.txt --out results.json
"""

from __future__ import annotations

import argparse
import functools
import gzip
import pathlib
import tempfile
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.accuracy import CONFIG, SAMPLE, run_jrec
from benchmarks.peers import client

DTYPES = ("float32", "float16", "int8", "int4")
BATCHES = (1, 64, 1024)
TOLERANCE = 1e-4


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    if not arguments.input.is_file():
        raise SystemExit(f"serving: {arguments.input} is no file; name a Criteo Kaggle log with --input")
    with harness.Report(arguments, "serving") as report, tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        data, run = folder / "data", folder / "run"
        run_jrec("prepare", "criteo-kaggle", "--input", str(arguments.input), "--out", str(data), "--quiet")
        overrides = [f"data.path={data}", f"out={run}", "log.progress=off", "evaluate.baselines=off"]
        run_jrec("train", str(CONFIG), *overrides, *(["max_steps=100"] if arguments.quick else []))
        for dtype in DTYPES:
            run_jrec("export", str(run), "--dtype", dtype, "--out", str(folder / dtype), "--quiet")
        _quality(report, arguments.input.name, folder, data)
        with client.start_or_skip("torch_dlrm") as peer:
            for dtype in ("float32", "int8"):
                _latency(report, folder, run, data, dtype, peer if dtype == "float32" else None)
        _from_columns(report, folder, arguments.input)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--input", type=pathlib.Path, default=SAMPLE, help="a log in Criteo Kaggle's format")
    return parser


def test_inputs(model: Any, data: pathlib.Path) -> tuple[Any, Any, np.ndarray]:
    """Dense features, ids and labels of the test split."""
    from jrec.data.blocks import LABEL, ShardReader
    from jrec.data.columns import concatenate
    from jrec.data.schema import Schema
    from jrec.serving.encode import model_inputs

    schema = Schema.load(data)
    blocks = []
    for shard in schema.splits["test"].shards:
        reader = ShardReader(data, shard)
        blocks += [reader.read(number) for number in range(len(reader))]
    columns: dict[str, Any] = {name: concatenate([block[name] for block in blocks]) for name in blocks[0]}
    dense, ids = model_inputs(columns, model.manifest)
    return dense, ids, columns[LABEL]


def _quality(report: harness.Report, log: str, folder: pathlib.Path, data: pathlib.Path) -> None:
    from jrec import serving
    from jrec.metrics import Scores, evaluate

    exact: float | None = None
    for dtype in DTYPES:
        model = serving.load(folder / dtype)
        dense, ids, labels = test_inputs(model, data)
        found = evaluate(Scores(logits=model.logits_of(dense, ids), labels=labels > 0.5))
        auc = found.auc or 0.0
        exact = auc if exact is None else exact
        size = sum(path.stat().st_size for path in (folder / dtype / "tables").iterdir())
        report.add(f"{log}, {dtype}", "test AUC", auc, "auc")
        report.add(f"{log}, {dtype}", "AUC lost to float32", 100 * (exact - auc) / exact, "%")
        report.add(f"{log}, {dtype}", "tables", size / 1e6, "MB")


def _latency(
    report: harness.Report, folder: pathlib.Path, run: pathlib.Path, data: pathlib.Path, dtype: str, peer: Any
) -> None:
    from jrec import serving
    from jrec.serving import Ids

    model = serving.load(folder / dtype)
    dense, ids, _ = test_inputs(model, data)
    for size in BATCHES:
        some = {name: Ids(values=np.ascontiguousarray(of.values[:size])) for name, of in ids.items()}
        numbers = np.ascontiguousarray(dense[:size])
        ours = harness.timed(functools.partial(model.logits_of, numbers, some), calls=max(1, 256 // size))
        case = f"Kaggle, {dtype}, batch {size:,}"
        if peer is None:
            report.compare(case, "rows to logits", ours)
            continue
        arrays = {
            "dense": numbers,
            "ids": np.concatenate([some[f.name].values for f in model.manifest.features], axis=1),
        }
        arrays |= {
            f"table{k:03d}": np.load(folder / dtype / "tables" / f"{f.table}.npy")
            for k, f in enumerate(model.manifest.features)
        }
        peer.setup("predict", arrays | _layers(run), batch=size)
        theirs = peer.call("logits")["logits"]
        if (off := float(np.abs(theirs - model.logits_of(numbers, some)).max())) > TOLERANCE:
            raise SystemExit(f"{case}: logits differ from PyTorch's by up to {off}")
        label = f"torch {peer.versions['torch']}"
        calls = max(1, 256 // size)
        report.compare(
            case, "rows to logits", ours, peer=label,
            theirs=functools.partial(peer.run, "predict", calls=calls), peer_versions=peer.versions,
        )  # fmt: skip


def _layers(run: pathlib.Path) -> dict[str, np.ndarray]:
    """The MLPs' weights, (out, in) as PyTorch has them, and biases."""
    from jrec.app.evaluate import restore_run

    model: Any = restore_run(run).model
    arrays = {}
    for name in ("bottom", "top"):
        for k, layer in enumerate(getattr(model, name).layers):
            arrays[f"{name}{k}_weight"] = np.asarray(layer.kernel[...]).T
            arrays[f"{name}{k}_bias"] = np.asarray(layer.bias[...])
    return arrays


def _from_columns(report: harness.Report, folder: pathlib.Path, log: pathlib.Path) -> None:
    from jrec import serving

    with gzip.open(log, "rt") if log.suffix == ".gz" else log.open() as file:
        lines = [next(file).rstrip("\n").split("\t") for _ in range(max(BATCHES))]
    names = ["label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))]
    columns = {name: [line[k] for line in lines] for k, name in enumerate(names)}
    for dtype in ("float32", "int8"):
        model = serving.load(folder / dtype)
        for size in BATCHES:
            some = {name: values[:size] for name, values in columns.items()}
            ours = harness.timed(functools.partial(model, some), calls=max(1, 64 // size))
            report.compare(f"Kaggle, {dtype}, batch {size:,}", "raw columns to scores", ours)


if __name__ == "__main__":
    main()
