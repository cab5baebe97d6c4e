"""Sequential recommenders on MovieLens-1M: all items ranked for the last item of each user, beside published figures.

All of 1,000,209 interactions, each user's in order of time; trained on all but each user's last item, which is then
ranked among all items but those of the history. The settings are those of the published figures (HSTU,
arXiv 2402.17152, Table 4): dim 50, 2 layers, 1 head, histories of 200, dropout 0.2, Adam at 0.001, batches of 128, 101
epochs, softmax over sampled items at a temperature of 0.05. There 128 items are sampled for each position; here all
positions of a batch share 8 items an example, 1,024. The interactions here have no times: HSTU's bias goes by place.

What was trained is kept in --work, so that the same command goes on where it was cut off; another commit needs another
folder.

``--part serve`` exports an untrained model, and times requests of one history of 200, then the 10 best of all items.

Examples:
  python -m benchmarks.sequences
  python -m benchmarks.sequences --part serve
  python -m benchmarks.sequences --kind sasrec --seeds 0 --epochs 20
"""

from __future__ import annotations

import csv
import gzip
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Literal

import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness

LOG = harness.ROOT.parent / "shared" / "data" / "ml1m_user_item.csv.gz"
PUBLISHED = {"sasrec": {"hr@10": 0.2853, "ndcg@10": 0.1603}, "hstu": {"hr@10": 0.3097, "ndcg@10": 0.1720}}
DIM, LENGTH, SAMPLED, BATCH = 50, 200, 8, 128
RATE = 1e-3


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--kind", nargs="+", choices=tuple(PUBLISHED), default=list(PUBLISHED), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--epochs", type=int, default=101, help="passes over the users (default: 101)")
    parser.add_argument("--part", nargs="+", choices=("train", "serve"), default=["train"], help="default: train")
    parser.add_argument("--work", type=pathlib.Path, default=harness.ROOT / "build" / "sequences", help="what is kept")
    arguments = parser.parse_args()
    if not LOG.is_file():
        raise SystemExit(f"sequences: {LOG}, MovieLens-1M's interactions, does not exist")
    users, items = read_histories(LOG)
    seeds, epochs = arguments.seeds, arguments.epochs
    if arguments.quick:
        users, seeds, epochs = users[:300], seeds[:1], 1
    with harness.Report(arguments, "sequences") as report:
        for kind in arguments.kind if "serve" in arguments.part else ():
            serve(report, kind, items, requests=20 if arguments.quick else 2_000)
        for kind in arguments.kind if "train" in arguments.part else ():
            found = [
                harness.kept(
                    arguments.work / f"{kind}-{seed}-{epochs}-{len(users)}.json",
                    lambda kind=kind, seed=seed: evaluate(report, kind, users, items, seed, epochs),
                )
                for seed in seeds
            ]
            for seed, one in zip(seeds, found, strict=True):
                for name, value in one.items():
                    report.add(f"ml-1m, {kind}, seed {seed}", name, value, "min" if name == "training" else "")
            case = f"ml-1m, {kind}, {epochs} epochs, {len(seeds)} seed(s)"
            for name, published in PUBLISHED[kind].items():
                values = [one[name] for one in found]
                mean = statistics.mean(values)
                report.add(case, f"{name}, mean", mean, "", peer="published", ratio=mean / published)
                report.add(case, f"{name}, least", min(values), "")


def read_histories(path: pathlib.Path) -> tuple[list[np.ndarray], int]:
    """Each user's items in order of time, numbered from 0; and how many items there are."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        pairs = np.array([(int(user), int(item)) for user, item in list(csv.reader(file))[1:]])
    _, items = np.unique(pairs[:, 1], return_inverse=True)
    order = np.argsort(pairs[:, 0], kind="stable")
    bounds = np.flatnonzero(np.diff(pairs[order, 0])) + 1
    return np.split(items[order], bounds), int(items.max()) + 1


def padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    """(len(rows), length): the last items of each row, -1 behind its end."""
    out = np.full((len(rows), length), -1, np.int64)
    for line, row in zip(out, rows, strict=True):
        line[: min(len(row), length)] = row[-length:]
    return out


def batches(users: list[np.ndarray], items: int, seed: int, epochs: int) -> Iterator[dict[str, np.ndarray]]:
    """Users in a new order each epoch; a batch's last item of a user is left for the test."""
    rng = np.random.default_rng(seed)
    history, following = padded([u[:-2] for u in users], LENGTH), padded([u[1:-1] for u in users], LENGTH)
    for _ in range(epochs):
        order = rng.permutation(len(users))
        for begin in range(0, len(users), BATCH):
            chosen = order[begin : begin + BATCH]
            sampled = rng.integers(0, items, (len(chosen), SAMPLED))
            yield {"history": history[chosen], "next": following[chosen], "sampled": sampled}


def modules(kind: Literal["hstu", "sasrec"], items: int, seed: int) -> tuple[jrec.nn.NextItem, jrec.nn.SparseOptimizer]:
    """The model and its optimizer."""
    layout = jrec.nn.next_item_layout(items, dim=DIM, length=LENGTH, sampled=SAMPLED)
    model = jrec.nn.NextItem(layout, jrec.nn.SequenceConfig(kind=kind), rngs=nnx.Rngs(seed, dropout=seed + 1000))
    rows = jrec.ops.Adam(learning_rate=RATE, b2=0.98)
    return model, jrec.nn.SparseOptimizer(model, dense=optax.adam(RATE, b2=0.98), embedding=rows)


def serve(report: harness.Report, kind: Literal["hstu", "sasrec"], items: int, *, requests: int) -> None:
    """Milliseconds from a history of 200 to the user's vector, and to the 10 best items."""
    rng = np.random.default_rng(0)
    with jrec.distribute(*modules(kind, items, 0)) as run, tempfile.TemporaryDirectory() as folder:
        run.export(pathlib.Path(folder) / "export")
        model = jrec.serving.load(pathlib.Path(folder) / "export", batch_sizes=[1])
        model.warm_up()
        vector, best = [], []
        for _ in range(requests):
            history = rng.integers(0, items, (1, LENGTH))
            start = time.perf_counter()
            user = model.logits({"history": history})["user"]
            vector.append(1e3 * (time.perf_counter() - start))
            model.top_k(user, "item", 10, seen=history, unit=True)
            best.append(1e3 * (time.perf_counter() - start))
    case = f"{kind}, one history of {LENGTH}, {items:,} items"
    for name, times in (("vector", vector), ("10 best items", best)):
        for percentile in (50, 99):
            report.add(case, f"{name}, p{percentile}", float(np.percentile(times, percentile)), "ms")


def evaluate(
    report: harness.Report, kind: Literal["hstu", "sasrec"], users: list[np.ndarray], items: int, seed: int, epochs: int
) -> dict[str, float]:
    """Trains one model and ranks each user's last item."""
    model, optimizer = modules(kind, items, seed)
    start, steps, case = time.perf_counter(), -(-len(users) // BATCH), f"ml-1m, {kind}, seed {seed}"
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=jrec.nn.next_item_loss())
        feed = run.feed(batches(users, items, seed, epochs), label=None, batch_size=BATCH, extras=["next", "sampled"])
        for batch in feed:
            loss, _ = step(batch)
            if run.steps % (10 * steps) == 0 and run.steps < epochs * steps:
                found = score(run, users)
                figures = f"loss {float(loss):.3f}, HR@10 {found['hr@10']:.4f}, NDCG@10 {found['ndcg@10']:.4f}"
                report.note(f"{case}, epoch {run.steps // steps}: {figures}, {time.perf_counter() - start:.0f} s")
        seconds, found = time.perf_counter() - start, score(run, users)
    report.note(f"{case}: HR@10 {found['hr@10']:.4f}, NDCG@10 {found['ndcg@10']:.4f} in {seconds / 60:.1f} min")
    return {**found, "training": seconds / 60}


def score(run: jrec.Run, users: list[np.ndarray]) -> dict[str, float]:
    """Metrics of each user's last item, ranked among all items but those before it."""
    history, nothing = padded([u[:-1] for u in users], LENGTH), np.full((len(users), 1), -1)
    columns = {"history": history, "next": nothing, "sampled": nothing}
    vectors = run.predict(columns, batch_size=min(512, len(users)))["user"]
    rows = run.table("item")
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    targets = np.array([u[-1] for u in users])
    seen = padded([u[:-1] for u in users], max(map(len, users)))
    return jrec.nn.ranking_metrics(jrec.nn.ranks(vectors, rows, targets, seen=seen), at=(10, 50))


if __name__ == "__main__":
    main()
