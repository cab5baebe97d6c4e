"""Index reordering (EL-Rec, section IV): unique prefixes and step time of tensor-train tables, time, memory, loader.

Each dataset's tables are reordered in a process of its own. Figures are of the training split's batches, "in order of
time" or "shuffled" (data.window_blocks=8, as training does by default), or of the valid split's ("held out"), which no
order has seen. The ratio is the figure in order of frequency, as `jrec prepare` numbers rows, divided by the reordered
rows: above 1, communities help.

    prefixes                    mean unique prefixes of a batch (row // slices of the last core)
    step                        forward, backward and Adagrad of the first table's cores, dim 16, rank 16
    graph, communities, memory  of the reordering; memory is the process's peak above that before it began
    degree all                  all pairs of the first table's rows in place of a sample, on the real samples
    modularity of all pairs     of the communities found by sampling, on the graph of all pairs
    loader                      passes over the training split with and without the bijection

Datasets: criteo and taobao are the real samples in --data (skipped where absent); drift is `jrec synth`'s Kaggle shape
with daily drift, still the same without it; sessions is planted: every 4,096 examples another group of rows is in use.

Examples:
  python -m benchmarks.reorder --quick
  python -m benchmarks.reorder --dataset criteo sessions --data ../shared/data --batch 1024 4096
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks import harness
from jrec.data.schema import DatasetError

REAL = {
    "criteo": (("criteo-kaggle",), "criteo_kaggle_80k.tsv.gz", ("C16", "C10", "C21", "C4")),
    "taobao": (("taobao", "--form", "intent"), "taobao_user_behavior_96k.csv.gz", ("user_id", "item_id")),
}
SYNTHETIC = {"drift": ("C3",), "still": ("C3",), "sessions": ("items",)}
DATA = harness.ROOT.parent / "shared" / "data"
BATCHES, QUICK_BATCHES = (256, 1024, 4096), (1024,)
EXAMPLES, QUICK_EXAMPLES = 1 << 18, 1 << 16
TABLE_ROWS = 200_000
SESSION, GROUPS = 4096, 16
GRAPH_BATCH = 1024
DIM, RANK = 16, 16
ALL_PAIRS = 12_000_000  # edges; where all pairs are more, they are not taken
SECONDS = 3.0  # of a pair of sides


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    if arguments.measure:
        try:
            print(json.dumps(measure(arguments)))
        except DatasetError as error:  # more pairs than ALL_PAIRS
            print(json.dumps({"infeasible": str(error)}))
        return
    with harness.Report(arguments, "reorder") as report, tempfile.TemporaryDirectory() as temporary:
        for name in arguments.dataset:
            folder = _make(report, name, pathlib.Path(temporary) / name, arguments)
            if folder is not None:
                _report(report, name, folder, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    names = (*REAL, *SYNTHETIC)
    parser.add_argument("--dataset", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--data", type=pathlib.Path, default=DATA, metavar="DIR", help="of the real samples")
    parser.add_argument("--batch", nargs="+", type=int, help=f"default: {' '.join(map(str, BATCHES))}")
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "TABLES", "DEGREE"), help=argparse.SUPPRESS)
    return parser


def _make(report: harness.Report, name: str, folder: pathlib.Path, arguments: Any) -> pathlib.Path | None:
    examples = QUICK_EXAMPLES if report.quick else EXAMPLES
    if name in REAL:
        format_arguments, file, _ = REAL[name]
        path = arguments.data / file
        if not path.is_file():
            report.note(f"{name} is skipped: there is no {path}")
            return None
        command = [
            sys.executable,
            "-m",
            "jrec",
            "prepare",
            *format_arguments,
            "--input",
            str(path),
            "--out",
            str(folder),
        ]
        subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    elif name == "sessions":
        sessions(folder, examples)
    else:
        from jrec.prepare.synth import SynthOptions, shape_like, synthesize

        shape = shape_like("criteo-kaggle", table_rows=TABLE_ROWS)
        synthesize(shape, folder, SynthOptions(rows=examples, drift=name == "drift"))
    return folder


def sessions(folder: pathlib.Path, examples: int, rows: int = TABLE_ROWS) -> None:
    """Makes a dataset of one table: 30 % power-law ids, the others from the group of rows that is in use now."""
    from jrec.data.blocks import ShardWriter, shard_file
    from jrec.data.schema import CategoricalFeature, Schema, Split, Table

    folder.mkdir()
    rng = np.random.default_rng(0)
    splits, counts, place = {}, None, np.arange(rows, dtype=np.uint32)
    for split, count in (("train", examples), ("valid", examples // 8)):
        group = np.repeat(rng.integers(0, GROUPS, -(-count // SESSION)), SESSION)[:count]
        ids = group + GROUPS * rng.integers(0, rows // GROUPS, count)
        hot = rng.random(count) < 0.3
        ids[hot] = (rng.pareto(1.05, hot.sum()) * 10).astype(np.int64) % rows
        if counts is None:
            raw = np.bincount(ids, minlength=rows)
            place[np.argsort(-raw, kind="stable")] = np.arange(rows)
            counts = np.sort(raw)[::-1]
        with ShardWriter(folder / shard_file(split, 0, 1), 8192) as writer:
            writer.write({"label": rng.integers(0, 2, count).astype(np.float32), "items": place[ids]})
        splits[split] = Split(shards=(writer.close(),))
    np.save(folder / "counts.npy", counts)
    Schema(
        name="sessions",
        block_size=8192,
        dense=(),
        categorical=(CategoricalFeature(name="items", table="items", fixed_length=True),),
        tables=(Table(name="items", rows=rows, counts="counts.npy"),),
        splits=splits,
        provenance={},
    ).save(folder)


def _report(report: harness.Report, name: str, folder: pathlib.Path, arguments: Any) -> None:
    tables = REAL[name][2] if name in REAL else SYNTHETIC[name]
    sizes = arguments.batch or (QUICK_BATCHES if report.quick else BATCHES)
    degrees = ("16",) if report.quick else ("4", "16", "all") if name in REAL else ("4", "16")
    peer = "order of frequency"
    for degree in degrees:
        command = [sys.executable, "-m", "benchmarks.reorder", "--batch", *map(str, sizes)]
        named = tables[:1] if degree == "all" else tables
        command += ["--measure", str(folder), ",".join(named), degree, *(["--quick"] if report.quick else [])]
        done = subprocess.run(command, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        if "infeasible" in measured:
            report.note(f"{name}, degree {degree} is left out: {measured['infeasible']}")
            continue
        case = f"{name}, degree {degree}"
        for line in measured["prefixes"]:
            where = f"{case}, {line['table']}, {line['where']}, batch {line['batch']:,}"
            if degree == "16":
                report.add(where, "prefixes, random order", line["random"], "count")
                report.add(where, "prefixes, order of frequency", line["frequency"], "count")
            ratio = line["frequency"] / line["reordered"]
            report.add(where, "prefixes, reordered", line["reordered"], "count", peer=peer, ratio=ratio)
        for line in measured["tables"]:
            for metric, key, unit in (
                ("graph", "graph_seconds", "s"),
                ("communities", "community_seconds", "s"),
                ("edges", "edges", "count"),
            ):
                report.add(f"{case}, {line['table']}", metric, line[key], unit)
            report.add(f"{case}, {line['table']}", "modularity of its own graph", line["modularity"], "ratio")
        for degree_drawn, value in measured.get("modularity", {}).items():
            report.add(f"{name}, degree {degree_drawn}, {tables[0]}", "modularity of all pairs", value, "ratio")
        report.add(case, "memory", measured["peak"] / 2**20, "MiB")
        if degree == "16":
            for line in measured["steps"]:
                report.add(
                    f"{case}, {line['where']}", "step, fastest", line["ms"], "ms", peer=peer, ratio=line["ratio"]
                )
            loader = measured["loader"]
            report.add(
                case, "loader, fastest", loader["rate"], "examples/s", peer="no bijection", ratio=loader["ratio"]
            )


def measure(arguments: Any) -> dict[str, Any]:
    """Reorders one dataset's tables and measures, in this process."""
    from jrec.data.schema import Schema
    from jrec.prepare.reorder.effect import measure_effects, random_order
    from jrec.prepare.reorder.log import Reading, batches
    from jrec.prepare.reorder.options import ReorderOptions
    from jrec.prepare.reorder.table import index_graph, table_order
    from jrec.progress import Progress

    folder, tables, degree = arguments.measure
    schema = Schema.load(folder)
    options = ReorderOptions(
        batch_size=GRAPH_BATCH,
        degree=math.inf if degree == "all" else float(degree),
        max_edges=ALL_PAIRS if degree == "all" else 8_000_000,
    )
    next(iter(batches(folder, schema, "train", tables.split(","), Reading(batch_size=GRAPH_BATCH))))  # compiles
    before = _memory("VmRSS")
    quiet = Progress(show=False)
    graphs = [index_graph(folder, schema, table, options, quiet) for table in tables.split(",")]
    table_orders = [table_order(graph, options, quiet) for graph in graphs]
    peak = _memory("VmHWM") - before
    orders = {
        o.table: {
            "random": random_order(len(o.order), 0), "frequency": o.frequency_order, "reordered": o.order
        }
        for o in table_orders
    }  # fmt: skip
    prefixes = []
    for where, split, blocks in (("in order of time", "train", 0), ("shuffled", "train", 8), ("held out", "valid", 0)):
        for size in arguments.batch:
            if size > schema.splits[split].examples:
                continue
            reading = Reading(batch_size=size, window_blocks=blocks, limit=32, full=True)
            effects = measure_effects(folder, schema, split, orders, [reading])
            prefixes += [{"where": where, "batch": size, "table": e.table, **e.prefixes} for e in effects]
    result = {"prefixes": prefixes, "tables": [{"table": o.table, **o.figures()} for o in table_orders], "peak": peak}
    if degree == "all":
        own = table_orders[0].modularity
        result["modularity"] = {"all": own, **_modularity_of_all_pairs(folder, schema, graphs[0], options)}
    if degree == "16":
        seconds = harness.QUICK_SECONDS if arguments.quick else SECONDS
        result["steps"] = list(_steps(folder, schema, table_orders[0], arguments.batch, seconds))
        result["loader"] = _loader(folder, schema, table_orders, seconds)
    return result


def _modularity_of_all_pairs(folder: str, schema: Any, all_pairs: Any, options: Any) -> dict[str, float]:
    """By degree, how good the communities found in the sampled graph are on the graph of all pairs."""
    from jrec.prepare.reorder.communities import communities, modularity
    from jrec.prepare.reorder.table import index_graph
    from jrec.progress import Progress

    modularities = {}
    for degree in (4, 16):
        sampled = dataclasses.replace(options, degree=float(degree))
        graph = index_graph(folder, schema, all_pairs.table, sampled, Progress(show=False))
        community = communities(graph.edges, graph.vertices, method=options.method, seed=options.seed).of_vertex
        alone = community < 0  # a row without an edge in the sample is a community by itself
        community[alone] = community.max() + 1 + np.arange(np.count_nonzero(alone))
        modularities[str(degree)] = modularity(all_pairs.edges, community)
    return modularities


def _steps(folder: str, schema: Any, table_order: Any, sizes: list[int], seconds: float):
    """Times the first table's step on the same batches before and after, alternating."""
    import jax
    import jax.numpy as jnp

    from jrec import ops
    from jrec.ops import tt
    from jrec.prepare.reorder.log import Reading, batches

    shape = tt.TTShape.search(len(table_order.order), DIM, ranks=RANK)
    optimizer = ops.Adagrad(learning_rate=0.01, initial_accumulator=0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(cores: Any, slots: Any, ids: jax.Array) -> Any:
        activations, residuals = tt.tt_lookup(cores, shape, ops.Bags(ids=ids))
        return tt.tt_apply_gradients(optimizer, cores, slots, shape, residuals, activations)

    for size in sizes:
        reading = Reading(batch_size=size, limit=8, full=True)
        log = [batch[table_order.table] for batch in batches(folder, schema, "train", [table_order.table], reading)]
        runs = []
        for order in (table_order.order, table_order.frequency_order):
            ids = [jnp.asarray(order[rows].astype(np.int32).reshape(-1, 1)) for rows in log]
            runs.append(harness.timed(functools.partial(_train, step, shape, optimizer, ids)))
        measured = harness.alternate(*runs, seconds=seconds)
        where = f"{table_order.table}, in order of time, batch {size:,}"
        yield {"where": where, "ms": 1e3 * measured.fastest / len(log), "ratio": measured.ratio_of_fastest}


def _train(step: Any, shape: Any, optimizer: Any, batches: list[Any]) -> Any:
    import jax

    from jrec.ops import tt

    cores = tt.tt_init(shape, jax.random.key(0))
    slots = tt.tt_init_slots(optimizer, cores)
    for ids in batches:
        cores, slots = step(cores, slots, ids)
    return cores


def _loader(folder: str, schema: Any, orders: list[Any], seconds: float) -> dict[str, float | None]:
    """Passes over the training split with bijections against without, alternating."""
    from jrec.data.bijection import save_order
    from jrec.data.loader import LoaderConfig, make_loader
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

    entries = {o.table: save_order(folder, o.table, o.order) for o in orders}
    tables = tuple(dataclasses.replace(t, bijection=entries.get(t.name)) for t in schema.tables)
    layout = EmbeddingLayout.build(
        [TableConfig(name=t.name, rows=t.rows, dim=DIM) for t in tables],
        [
            FeatureConfig(name=f.name, table=f.table, max_length=f.max_length, fixed_length=f.fixed_length)
            for f in schema.categorical
        ],
    )
    config = LoaderConfig(batch_size=2048, workers=1)
    loaders = [
        make_loader(folder, one, layout, "train", config)
        for one in (dataclasses.replace(schema, tables=tables), schema)
    ]
    measured = harness.alternate(*(harness.timed(lambda x=x: [None for _ in x]) for x in loaders), seconds=seconds)
    return {"rate": schema.splits["train"].examples / measured.fastest, "ratio": measured.ratio_of_fastest}


def _memory(field: str) -> float:
    for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
