"""Sequential recommenders on MovieLens: all items ranked for the last item of each user, beside published figures.

All of MovieLens-1M's 1,000,209 interactions, each user's in order of time; trained on all but each user's last item,
which is then ranked among all items but those of the history, the last 200, as the published figures have it, and once
more among all but those that the user has seen at any time, an easier test. The settings are those of the published
figures, too (HSTU, arXiv 2402.17152, Table 4): dim 50, 2 layers, 1 head, histories of 200, dropout 0.2, Adam at 0.001,
batches of 128, 101 epochs, softmax over sampled items at a temperature of 0.05. There 128 items are sampled for each
position; here all positions of a batch share 8 items an example, 1,024, unless ``--negatives`` says otherwise:
"position" samples as published, "all" tells an item from all others. ``--normalize length`` has HSTU divide by the
items of each history, and ``--rows normal`` starts items by the published normal distribution. The interactions here
have no times: HSTU's bias goes by place.
``--log ml-100k`` has times, and no published figures: with ``--times`` HSTU's bias goes by them, too. That log lies in
a package (``benchmarks.quality_logs`` says how to get it).

Beside the models stands what needs no training: the baseline of ``jrec train``'s reports, items ranked by how often
users turned to them right after the history's last item; and what more counting comes to, of pairs up to five items
apart and of the history's last ten items, each by one over its distance, by the items' counts to the power of 0.3.

What was trained is kept in --work, with a checkpoint of each epoch, so that the same command goes on where it was cut
off, with the same bits; another commit needs another folder.

``--part count`` is what needs no training, alone. ``--part serve`` exports untrained models, and times requests of
one history of 200 and of 2,000: the user's vector, computed whole, or of the last event alone where what was computed
before it is kept; then the 10 best of all items.

Examples:
  python -m benchmarks.sequences
  python -m benchmarks.sequences --part count
  python -m benchmarks.sequences --part serve
  python -m benchmarks.sequences --kind sasrec --seeds 0 --epochs 20
  python -m benchmarks.sequences --kind hstu --negatives all --normalize length --rows normal
  python -m benchmarks.sequences --log ml-100k --kind hstu --times
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import pathlib
import statistics
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness, quality_logs
from jrec.app.baselines.item_order import ItemOrder, Pairs

LOG = harness.ROOT.parent / "shared" / "data" / "ml1m_user_item.csv.gz"
ML_100K = ("recbole-*.whl", "recbole/dataset_example/ml-100k/ml-100k.inter")
PUBLISHED = {"sasrec": {"hr@10": 0.2853, "ndcg@10": 0.1603}, "hstu": {"hr@10": 0.3097, "ndcg@10": 0.1720}}
DIM, LENGTH, BATCH = 50, 200, 128
SAMPLED = {"batch": 8, "position": LENGTH * 128}
"""Items that are sampled for an example, by ``--negatives``."""
SERVED, CACHE = {LENGTH: 2_000, 2_000: 200}, 1 << 28
"""Requests by the length of a history, and the bytes that are kept of histories."""
RATE = 1e-3
NEAR, LAST, POPULAR = 5, 10, 0.3
"""Of ``wide_transitions``: how far apart pairs are, how many items of a history count, and how counts are damped."""
PROTOCOLS = {"history": "", "all": ", all seen items left out"}
"""Which of a user's items are not ranked, and how cases are called: the last ``LENGTH``, as published, or all."""


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--log", choices=("ml-1m", "ml-100k"), default="ml-1m", help="default: ml-1m")
    parser.add_argument("--negatives", choices=("batch", "position", "all"), default="batch", help="default: batch")
    parser.add_argument("--normalize", choices=("maximum", "length"), default="maximum", help="default: maximum")
    parser.add_argument("--rows", choices=("uniform", "normal"), default="uniform", help="default: uniform")
    parser.add_argument("--times", action="store_true", help="HSTU reads how long ago items were (ml-100k)")
    parser.add_argument("--kind", nargs="+", choices=tuple(PUBLISHED), default=list(PUBLISHED), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--epochs", type=int, default=101, help="passes over the users (default: 101)")
    parser.add_argument(
        "--part", nargs="+", choices=("count", "train", "serve"), default=["count", "train"],
        help="orders that need no training, trained models, requests (default: count train)",
    )  # fmt: skip
    parser.add_argument("--work", type=pathlib.Path, default=harness.ROOT / "build" / "sequences", help="what is kept")
    arguments = parser.parse_args()
    if arguments.times and (arguments.log != "ml-100k" or arguments.kind != ["hstu"]):
        parser.error("--times is of --log ml-100k --kind hstu: ml-1m has none, and SASRec reads none")
    if arguments.normalize == "length" and arguments.kind != ["hstu"]:
        parser.error("--normalize length is of --kind hstu: SASRec divides by nothing")
    variant = Variant(negatives=arguments.negatives, normalize=arguments.normalize, rows=arguments.rows)
    users, items = read_ml_1m() if arguments.log == "ml-1m" else read_ml_100k()
    seeds, epochs = arguments.seeds, arguments.epochs
    if arguments.quick:
        users, seeds, epochs = users[:300], seeds[:1], 1
    if not arguments.times:
        users = [dataclasses.replace(user, times=None) for user in users]
    with harness.Report(arguments, "sequences") as report:
        for kind in arguments.kind if "serve" in arguments.part else ():
            for length, requests in SERVED.items():
                serve(report, kind, items, length, requests=10 if arguments.quick else requests)
        tests = {protocol: Test.of(users, protocol) for protocol in PROTOCOLS}
        if "count" in arguments.part:
            count(report, arguments.log, users, items, tests)
        for kind in arguments.kind if "train" in arguments.part else ():
            name = (f"{kind} with times" if arguments.times else kind) + variant.shown
            files = {
                seed: arguments.work / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}-{epochs}-{len(users)}"
                for seed in seeds
            }
            trained = [
                harness.kept(
                    file.with_name(f"{file.name}.json"),
                    lambda kind=kind, seed=seed, name=name, file=file: evaluate(
                        report,
                        f"{arguments.log}, {name}, seed {seed}",
                        kind,
                        variant,
                        users,
                        items,
                        tests,
                        seed,
                        epochs,
                        file,
                    ),
                )
                for seed, file in files.items()
            ]
            for protocol in PROTOCOLS:
                log = arguments.log + PROTOCOLS[protocol]
                for seed, figures in zip(seeds, trained, strict=True):
                    add_figures(report, f"{log}, {name}, seed {seed}", figures[protocol])
                case = f"{log}, {name}, {epochs} epochs, {len(seeds)} seed(s)"
                published = PUBLISHED[kind] if log == "ml-1m" else {}
                add_means(report, case, [figures[protocol] for figures in trained], published)
            for seed, figures in zip(seeds, trained, strict=True):
                report.add(f"{arguments.log}, {name}, seed {seed}", "training", figures["training"], "min")


def count(report: harness.Report, log: str, users: list[User], items: int, tests: Mapping[str, Test]) -> None:
    """What needs no training."""
    wide = wide_transitions(users, items)
    for protocol, test in tests.items():
        case = f"{log}{PROTOCOLS[protocol]}, item-to-item transitions"
        add_figures(report, case, transitions(users, items, test))
        figures = test.metrics(wide, np.eye(items, dtype=np.float32))
        add_figures(report, f"{case}, {NEAR} apart, of the last {LAST} items", figures)


def add_figures(report: harness.Report, case: str, figures: Mapping[str, float]) -> None:
    """A line for each metric of one seed."""
    for metric, value in figures.items():
        report.add(case, metric, value, "")


def add_means(
    report: harness.Report, case: str, seeds: Sequence[Mapping[str, float]], published: Mapping[str, float]
) -> None:
    """The means and the least of all seeds' figures, beside the published ones where the protocol is theirs."""
    for metric in next(iter(PUBLISHED.values())):
        values = [figures[metric] for figures in seeds]
        mean = statistics.mean(values)
        beside = {"peer": "published", "ratio": mean / published[metric]} if published else {}
        report.add(case, f"{metric}, mean", mean, "", **beside)
        report.add(case, f"{metric}, least", min(values), "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What may differ from the settings of the other lines.

    Attributes:
      negatives: As of ``jrec.nn.next_item_loss``.
      normalize: As of ``jrec.nn.SequenceConfig``.
      rows: Whether items start "uniform" in ±1/sqrt(items), or "normal", as published: of deviation 0.02, cut off at
        twice that.
    """

    negatives: Literal["batch", "position", "all"] = "batch"
    normalize: Literal["maximum", "length"] = "maximum"
    rows: Literal["uniform", "normal"] = "uniform"

    @property
    def shown(self) -> str:
        """What cases say of it, nothing of the defaults."""
        told_from = {"batch": "", "position": ", 128 items a position", "all": ", all items"}[self.negatives]
        normalized = ", by length" if self.normalize == "length" else ""
        return told_from + normalized + (", normal rows" if self.rows == "normal" else "")

    def sampled(self, items: int) -> int:
        """Items that are sampled for an example."""
        return -(-items // BATCH) if self.negatives == "all" else SAMPLED[self.negatives]


PLAIN = Variant()


@dataclasses.dataclass(frozen=True)
class User:
    """A user's items in order of time, numbered from 0, and when each was, in seconds; None without times."""

    items: np.ndarray
    times: np.ndarray | None = None

    def columns(self, stop: int) -> dict[str, np.ndarray]:
        """The items before the one at ``stop``, what follows each, and how long before it each was."""
        columns = {"history": self.items[:stop], "next": self.items[1 : stop + 1]}
        return columns if self.times is None else columns | {"age": self.times[stop] - self.times[:stop]}


@dataclasses.dataclass(frozen=True)
class Test:
    """Each user's last item, and which items are not ranked beside it, -1 for none: (users,) and (users, length)."""

    targets: np.ndarray
    seen: np.ndarray

    @staticmethod
    def of(users: list[User], protocol: str) -> Test:
        """The last items, and what a protocol of ``PROTOCOLS`` does not rank beside them."""
        length = LENGTH if protocol == "history" else max(len(user.items) for user in users)
        seen = padded([user.items[:-1] for user in users], length)
        return Test(np.array([user.items[-1] for user in users]), seen)

    def metrics(self, queries: np.ndarray, rows: np.ndarray) -> dict[str, float]:
        """Metrics of the last items by the products of (users, dim) queries and (items, dim) rows."""
        return jrec.nn.ranking_metrics(jrec.nn.ranks(queries, rows, self.targets, left_out=self.seen), at=(10, 50))


def transitions(users: list[User], items: int, test: Test) -> dict[str, float]:
    """Metrics of items ranked by how often they follow the history's last one in training, then by how often at all."""
    trained = [user.items[:-1] for user in users]
    before, after = (np.concatenate([row[span] for row in trained]) for span in (slice(-1), slice(1, None)))
    counts = np.bincount(np.concatenate(trained), minlength=items)
    order = ItemOrder(counts, Pairs.counted(before, after, items))
    example, place = np.nonzero(test.seen >= 0)
    last = np.array([row[-1] for row in trained])
    ranks = order.ranks(
        test.targets, history=(np.arange(len(last)), last), left_out=(example, test.seen[example, place])
    )
    return jrec.nn.ranking_metrics(ranks, at=(10, 50))


def wide_transitions(users: list[User], items: int) -> np.ndarray:
    """(users, items) float32: how often items came up to ``NEAR`` after the last ``LAST``, by their damped counts."""
    trained = [user.items[:-1] for user in users]
    follows = np.zeros((items, items), np.float32)
    for row in trained:
        for apart in range(1, min(NEAR, len(row) - 1) + 1):
            np.add.at(follows, (row[:-apart], row[apart:]), 1 / apart)
    follows /= np.maximum(np.bincount(np.concatenate(trained), minlength=items), 1) ** POPULAR
    last = padded([row[::-1][:LAST] for row in trained], LAST)
    weights = np.where(last >= 0, 1 / np.arange(1, LAST + 1), 0).astype(np.float32)
    scores = np.zeros((len(users), items), np.float32)
    for item, weight in zip(last.T, weights.T, strict=True):
        scores += weight[:, None] * follows[item]
    return scores


def read_ml_1m() -> tuple[list[User], int]:
    """Each user, and how many items there are."""
    if not LOG.is_file():
        raise SystemExit(f"sequences: {LOG}, MovieLens-1M's interactions, does not exist")
    with gzip.open(LOG, "rt", encoding="ascii") as file:
        return users_of(np.array([(int(user), int(item)) for user, item in list(csv.reader(file))[1:]]))


def read_ml_100k() -> tuple[list[User], int]:
    """Each user with times, and how many items there are."""
    try:
        package = quality_logs.Places(packages=quality_logs.PACKAGES, work=quality_logs.PACKAGES).package(ML_100K[0])
    except quality_logs.AbsentError as absent:
        raise SystemExit(f"sequences: {absent}; benchmarks/quality_logs.py says how to get it") from absent
    with zipfile.ZipFile(package) as wheel, wheel.open(ML_100K[1]) as file:
        lines = csv.reader(io.TextIOWrapper(file, "utf-8"), delimiter="\t")
        read = np.array([(int(user), int(item), int(at)) for user, item, _, at in list(lines)[1:]])
    return users_of(read[np.argsort(read[:, 2], kind="stable")])


def users_of(lines: np.ndarray) -> tuple[list[User], int]:
    """Each user of lines (user, item) or (user, item, time) in order of time, and how many items there are."""
    _, items = np.unique(lines[:, 1], return_inverse=True)
    order = np.argsort(lines[:, 0], kind="stable")
    bounds = np.flatnonzero(np.diff(lines[order, 0])) + 1
    columns = (np.split(column[order], bounds) for column in (items, *lines.T[2:]))
    return list(itertools.starmap(User, zip(*columns, strict=True))), int(items.max()) + 1


def padded(rows: list[np.ndarray], length: int, absent: int = -1) -> np.ndarray:
    """(len(rows), length): the last values of each row, ``absent`` behind its end."""
    out = np.full((len(rows), length), absent, np.int64)
    for line, row in zip(out, rows, strict=True):
        line[: min(len(row), length)] = row[-length:]
    return out


def columns_of(users: list[User], stop: int) -> dict[str, np.ndarray]:
    """(users, LENGTH): what ``User.columns`` says of the last items before each user's at ``stop``."""
    read = [user.columns(len(user.items) + stop) for user in users]
    return {name: padded([one[name] for one in read], LENGTH, 0 if name == "age" else -1) for name in read[0]}


def batches(
    users: list[User], items: int, seed: int, epochs: int, variant: Variant = PLAIN
) -> Iterator[dict[str, np.ndarray]]:
    """Users in a new order each epoch; a batch's last item of a user is left for the test."""
    rng, each = np.random.default_rng(seed), variant.sampled(items)
    columns = columns_of(users, -2)
    every = np.pad(np.arange(items), (0, -items % BATCH), constant_values=-1).reshape(BATCH, -1)
    for _ in range(epochs):
        order = rng.permutation(len(users))
        for begin in range(0, len(users), BATCH):
            chosen = order[begin : begin + BATCH]
            batch = {name: column[chosen] for name, column in columns.items()}
            if variant.negatives == "all":
                # The examples of a full batch share out the items: the last one of an epoch is filled up.
                missing = BATCH - len(chosen)
                for name, column in batch.items():
                    absent = 0 if name == "age" else -1
                    batch[name] = np.pad(column, ((0, missing), (0, 0)), constant_values=absent)
                yield batch | {"sampled": every, "weight": np.arange(BATCH) < len(chosen)}
            else:
                yield batch | {"sampled": rng.integers(0, items, (len(chosen), each)), "weight": np.ones(len(chosen))}


def modules(
    kind: Literal["hstu", "sasrec"], items: int, seed: int, variant: Variant = PLAIN, length: int = LENGTH
) -> tuple[jrec.nn.NextItem, jrec.nn.SparseOptimizer]:
    """The model and its optimizer."""
    layout = jrec.nn.next_item_layout(items, dim=DIM, length=length, sampled=variant.sampled(items))
    config = jrec.nn.SequenceConfig(kind=kind, normalize=variant.normalize)
    model = jrec.nn.NextItem(layout, config, rngs=nnx.Rngs(seed, dropout=seed + 1000))
    if variant.rows == "normal":
        start = jax.nn.initializers.truncated_normal(0.02)
        stacks = model.embeddings.arrays()
        model.embeddings.set_arrays({name: start(jax.random.key(seed), rows.shape) for name, rows in stacks.items()})
    rows = jrec.ops.Adam(learning_rate=RATE, b2=0.98)
    return model, jrec.nn.SparseOptimizer(model, dense=optax.adam(RATE, b2=0.98), embedding=rows)


def serve(report: harness.Report, kind: Literal["hstu", "sasrec"], items: int, length: int, *, requests: int) -> None:
    """Milliseconds from a history to the user's vector, whole and of its last event alone, and to the 10 best items."""
    rng = np.random.default_rng(0)
    with jrec.distribute(*modules(kind, items, 0, length=length)) as run, tempfile.TemporaryDirectory() as folder:
        export = pathlib.Path(folder) / "export"
        run.export(export)
        plain, keeping = (jrec.serving.load(export, batch_sizes=[1], history_cache=n) for n in (0, CACHE))
        times: dict[str, list[float]] = {"vector": [], "vector, one event more": [], "10 best items": []}
        for model in (plain, keeping):
            model.warm_up()
        for _ in range(requests):
            history = rng.integers(0, items, (1, length))
            keeping.logits({"history": history[:, :-1]})
            for name, model in (("vector", plain), ("vector, one event more", keeping)):
                start = time.perf_counter()
                user = model.logits({"history": history})["user"]
                times[name].append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
            plain.top_k(user, "item", 10, left_out=history, unit=True)
            times["10 best items"].append(times["vector"][-1] + 1e3 * (time.perf_counter() - start))
    case = f"{kind}, one history of {length:,}, {items:,} items"
    ratio = statistics.median(a / b for a, b in zip(times["vector"], times["vector, one event more"], strict=True))
    for name, values in times.items():
        beside = {"peer": "computed whole", "ratio": ratio} if name == "vector, one event more" else {}
        report.add(case, f"{name}, p50", float(np.percentile(values, 50)), "ms", **beside)
        report.add(case, f"{name}, p99", float(np.percentile(values, 99)), "ms")


def evaluate(
    report: harness.Report,
    case: str,
    kind: Literal["hstu", "sasrec"],
    variant: Variant,
    users: list[User],
    items: int,
    tests: Mapping[str, Test],
    seed: int,
    epochs: int,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Trains one model and ranks each user's last item: metrics by protocol, and the minutes of "training".

    A checkpoint in the folder, of each epoch, is gone on from, with the same bits.
    """
    model, optimizer = modules(kind, items, seed, variant, LENGTH)
    start, steps = time.perf_counter(), -(-len(users) // BATCH)
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=jrec.nn.next_item_loss(negatives=variant.negatives))
        if folder.is_dir():
            start -= run.restore(folder)["seconds"]
            report.note(f"{case}: goes on after epoch {run.steps // steps}")
        feed = run.feed(
            itertools.islice(batches(users, items, seed, epochs, variant), run.steps, None),
            dense=dense_of(users),
            label=None,
            weight="weight",
            batch_size=BATCH,
            extras=["next", "sampled"],
        )
        for batch in feed:
            loss, _ = step(batch)
            if run.steps % steps or run.steps == epochs * steps:
                continue
            seconds = time.perf_counter() - start
            run.save(folder, meta={"seconds": seconds}, keep=1)
            if run.steps % (10 * steps) == 0:
                metrics = score(run, users, tests)["history"]
                figures = f"loss {float(loss):.3f}, HR@10 {metrics['hr@10']:.4f}, NDCG@10 {metrics['ndcg@10']:.4f}"
                report.note(f"{case}, epoch {run.steps // steps}: {figures}, {seconds:.0f} s")
        seconds, scores = time.perf_counter() - start, score(run, users, tests)
    for protocol, metrics in scores.items():
        text = f"HR@10 {metrics['hr@10']:.4f}, NDCG@10 {metrics['ndcg@10']:.4f} in {seconds / 60:.1f} min"
        report.note(f"{case}{PROTOCOLS[protocol]}: {text}")
    return {**scores, "training": seconds / 60}


def dense_of(users: list[User]) -> list[str]:
    """The dense columns of ``columns_of``."""
    return ["age"] if users[0].times is not None else []


def score(run: jrec.Run, users: list[User], tests: Mapping[str, Test]) -> dict[str, dict[str, float]]:
    """Metrics of each user's last item by a trained model, by protocol."""
    nothing = np.full((len(users), 1), -1)
    columns = columns_of(users, -1) | {"next": nothing, "sampled": nothing}
    vectors = run.predict(columns, dense=dense_of(users), batch_size=min(BATCH, len(users)))["user"]
    rows = run.table("item")
    units = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return {protocol: test.metrics(vectors, units) for protocol, test in tests.items()}


if __name__ == "__main__":
    main()
