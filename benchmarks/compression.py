"""Test AUC against the bytes of the tables: which compression to take, and what it costs.

One pass in order of time over the Criteo Kaggle sample, whose values all have rows, and over a synthetic twin of it;
DLRM with Kaggle's MLPs. All tables together get a 10th, a 100th and a 1,000th of their bytes as nearly as the way
allows, what finds the rows included: tables up to a size stay as they are, and each larger one gets that size, since
small tables are read as often as large ones.

    uncompressed    a row for every id
    hashed          a row for all ids of one hash
    quotient        the product of a row of the id's quotient and one of its remainder (Shi et al., KDD 2020)
    tensor train    three cores (TT-Rec), of the greatest rank that fits
    sketch          most of the bytes are rows of the most frequent ids' own, found by a sketch as they come, the others
                    a hashed table for all other ids (after CAFE, Zhang et al., SIGMOD 2024, which weighs ids by their
                    gradients): a table that grows, with 48 bytes a row for keys, counts and sketch

Examples:
  python -m benchmarks.compression
  python -m benchmarks.compression --data kaggle --seeds 0 --ways hashed sketch
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness
from benchmarks.accuracy import SAMPLE, run_jrec
from jrec.data import GrowingVocabulary, Growth
from jrec.data.blocks import ShardReader
from jrec.data.schema import Schema
from jrec.metrics import Scores, evaluate
from jrec.ops import tt

DIM, ROW_BYTES, KEPT_BYTES = 16, 64, 48
OWN = 0.7  # of a sketch's bytes, for rows of single ids
RATIOS = (10, 100, 1000)
RUNS = {"kaggle": (128, 3e-4), "twin": (1024, 0.0)}  # batch, and weight decay of rows, as configs/criteo_kaggle.toml
TWIN = ("synth", "--like", "criteo-kaggle", "--scale", "1/64", "--rows", "400000")
BOTTOM, TOP = (512, 256, 64, DIM), (512, 256)
PREDICTED, WARMUP = 4096, 20

Columns = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How one table of n rows is kept, in the bytes of ``kept`` rows as nearly as it goes.

    Attributes:
      tables: Its tables, by a suffix of its name.
      ids: From ids to the ids of each of these tables.
      join: From the rows of these tables, (batch, dim) each, and whether each is one of the id's own, to the id's.
      vocabularies: Of tables that grow.
      nbytes: Bytes of all of it.
    """

    tables: Mapping[str, jrec.TableConfig]
    ids: Callable[[np.ndarray], Mapping[str, np.ndarray]]
    nbytes: float
    join: Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array] = lambda rows, _: rows[""]
    vocabularies: Mapping[str, GrowingVocabulary] = dataclasses.field(default_factory=dict)


def uncompressed(name: str, rows: int, kept: float) -> Way:
    """A row for every id."""
    del kept
    table = jrec.TableConfig(name=name, rows=rows, dim=DIM)
    return Way(tables={"": table}, ids=lambda ids: {"": ids}, nbytes=ROW_BYTES * rows)


def hashed(name: str, rows: int, kept: float) -> Way:
    """A row for all ids of one hash."""
    del rows
    count = max(1, round(kept))
    table = jrec.TableConfig(name=name, rows=count, dim=DIM)
    return Way(tables={"": table}, ids=lambda ids: {"": hash_of(ids, count)}, nbytes=ROW_BYTES * count)


def quotient(name: str, rows: int, kept: float) -> Way:
    """The product of a row of the quotient and a row of the remainder."""
    divisor = math.isqrt(rows - 1) + 1  # the least of both tables together
    if kept > 2 * divisor:
        divisor = round((kept + math.sqrt(kept * kept - 4 * rows)) / 2)
    quotients = -(-rows // divisor)
    first = jrec.TableConfig(name=f"{name}.remainder", rows=divisor, dim=DIM)
    second = jrec.TableConfig(name=f"{name}.quotient", rows=quotients, dim=DIM)
    return Way(
        tables={".remainder": first, ".quotient": second},
        ids=lambda ids: {".remainder": ids % divisor, ".quotient": ids // divisor},
        # One plus the row: so products begin as long as a remainder's row, and get gradients from the first step on.
        join=lambda vectors, _: vectors[".remainder"] * (1 + vectors[".quotient"]),
        nbytes=ROW_BYTES * (divisor + quotients),
    )


def tensor_train(name: str, rows: int, kept: float) -> Way:
    """Three cores of the greatest rank that fits."""
    shape = tt.TTShape.search(rows, DIM, ranks=1)
    with contextlib.suppress(ValueError):  # a rank that represents no further table
        for rank in itertools.count(2):
            larger = tt.TTShape.search(rows, DIM, ranks=rank)
            if larger.num_parameters > kept * DIM:
                break
            shape = larger
    table = jrec.TableConfig(name=name, rows=rows, dim=DIM, tier="tt", tt_shape=shape)
    return Way(tables={"": table}, ids=lambda ids: {"": ids}, nbytes=4 * shape.num_parameters)


def sketch(name: str, rows: int, kept: float) -> Way:
    """Rows of their own for the most frequent ids, and a hashed table for all others."""
    del rows
    own = max(2, int(OWN * kept * ROW_BYTES / (ROW_BYTES + KEPT_BYTES)))
    shared = max(1, int((1 - OWN) * kept))
    return Way(
        tables={
            ".own": jrec.TableConfig(name=f"{name}.own", rows=own, dim=DIM),
            ".shared": jrec.TableConfig(name=f"{name}.shared", rows=shared, dim=DIM),
        },
        ids=lambda ids: {".own": ids, ".shared": hash_of(ids, shared)},
        join=lambda vectors, is_own: jnp.where(is_own[".own"], vectors[".own"], vectors[".shared"]),
        vocabularies={f"{name}.own": GrowingVocabulary(Growth(capacity=own, evict="lfu"))},
        nbytes=(ROW_BYTES + KEPT_BYTES) * own + ROW_BYTES * shared,
    )


WAYS = {"hashed": hashed, "quotient": quotient, "tensor train": tensor_train, "sketch": sketch}


def hash_of(ids: np.ndarray, rows: int) -> np.ndarray:
    """Rows that have nothing to do with how frequent an id is, which a dataset's numbers tell."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(rows)).astype(np.int64)


class Compressed(nnx.Module):
    """DLRM over vectors that are joined from the rows of one table or two."""

    def __init__(self, layout: jrec.EmbeddingLayout, ways: Mapping[str, Way], *, num_dense: int, rngs: nnx.Rngs):
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        self.ways = nnx.static(ways)
        vectors = len(ways) + 1
        self.bottom = jrec.nn.MLP((num_dense, *BOTTOM), activate_last=True, rngs=rngs)
        self.top = jrec.nn.MLP((DIM + vectors * (vectors - 1) // 2, *TOP, 1), activate_last=False, rngs=rngs)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> jax.Array:
        """(batch,) float32."""
        rows, bottom = self.embeddings.features(activations, bags), self.bottom(dense)
        joined = [bottom]
        for name, way in self.ways.items():
            own = {suffix: self._is_own(f"{name}{suffix}", bags) for suffix in way.tables if way.vocabularies}
            joined.append(way.join({suffix: rows[f"{name}{suffix}"] for suffix in way.tables}, own))
        products = jrec.nn.dot_interaction(jnp.stack(joined, axis=1))
        return self.top(jnp.concatenate([bottom, products], axis=1))[:, 0]

    def _is_own(self, feature: str, bags: Mapping[str, jrec.Bags]) -> jax.Array:
        """Whether each example's id is not row 0 of its table, the row of ids without one of their own; (batch, 1)."""
        ((stack, number),) = self.embeddings.layout.places[feature]
        ids, placed = bags[stack.name].ids, stack.features[number]
        batch = ids.shape[0] // stack.bags_per_example
        first = next(base for table, base in zip(stack.tables, stack.bases, strict=True) if table.name == feature)
        return ids[placed.first_bag * batch : (placed.first_bag + 1) * batch] != first


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=tuple(RUNS), default=list(RUNS), help="default: both")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    arguments = parser.parse_args()
    seeds, ratios = (arguments.seeds[:1], RATIOS[:1]) if arguments.quick else (arguments.seeds, RATIOS)
    with harness.Report(arguments, "compression") as report, tempfile.TemporaryDirectory() as folder:
        for name in arguments.data[: 1 if arguments.quick else None]:
            data = pathlib.Path(folder) / name
            if name == "kaggle" and not SAMPLE.is_file():
                report.note(f"kaggle is left out: {SAMPLE} is no file")
                continue
            kaggle = ("prepare", "criteo-kaggle", "--min-count", "1", "--input", str(SAMPLE))
            run_jrec(*(kaggle if name == "kaggle" else TWIN), "--out", str(data), "--quiet")
            whole = _judge(report, f"{name}, uncompressed", data, uncompressed, 1, RUNS[name], seeds, None)
            for way in arguments.ways:
                for ratio in ratios:
                    case = f"{name}, {way}, {ratio:,}x"
                    _judge(report, case, data, WAYS[way], ratio, RUNS[name], seeds, whole)


def _judge(
    report: harness.Report,
    case: str,
    data: pathlib.Path,
    way: Callable[[str, int, float], Way],
    ratio: float,
    settings: tuple[int, float],
    seeds: Sequence[int],
    whole: tuple[float, list[float]] | None,
) -> tuple[float, list[float]]:
    """Bytes of the tables, and the test AUCs of the seeds; reports them beside those of whole tables."""
    made = [train(data, way, ratio, *settings, seed) for seed in seeds]
    nbytes, aucs = made[0][0], [auc for _, auc in made]
    report.add(case, "bytes of all tables", nbytes / 1e6, "MB")
    report.add(case, "test auc, mean", statistics.mean(aucs), "auc")
    report.add(case, "test auc, least", min(aucs), "auc")
    if whole is not None:
        report.add(case, "compression", whole[0] / nbytes, "x")
        lost = [100 * (plain - auc) for plain, auc in zip(whole[1], aucs, strict=True)]
        report.add(case, "auc points lost, mean", statistics.mean(lost), "points")
        report.add(case, "auc points lost, greatest", max(lost), "points")
    return nbytes, aucs


def train(
    data: pathlib.Path, way: Callable[[str, int, float], Way], ratio: float, batch: int, decay: float, seed: int
) -> tuple[float, float]:
    """Trains one pass in order of time; bytes of the tables, and the AUC of the split test."""
    schema = Schema.load(data)
    sizes = {table.name: table.rows for table in schema.tables}
    most = most_rows(sizes.values(), ratio)
    ways = {f.name: _smaller(way, f.name, sizes[f.table], most) for f in schema.categorical}
    tables = {f"{name}{suffix}": table for name, w in ways.items() for suffix, table in w.tables.items()}
    features = [jrec.FeatureConfig(name=name, table=table.name, fixed_length=True) for name, table in tables.items()]
    layout = jrec.EmbeddingLayout.build(list(tables.values()), features)
    model = Compressed(layout, ways, num_dense=len(schema.dense), rngs=nnx.Rngs(seed))
    growing = functools.reduce(lambda one, other: one | dict(other.vocabularies), ways.values(), {})
    dense = [feature.name for feature in schema.dense]
    test, columns = (columns_of(data, schema, split, ways) for split in ("test", "train"))
    steps = -(-len(columns["label"]) // batch)
    optimizer = jrec.nn.SparseOptimizer(
        model,
        dense=optax.adam(_schedule(0.001, steps)),
        embedding=jrec.ops.RowWiseAdagrad(learning_rate=_schedule(0.1, steps), weight_decay=decay),
        cores=jrec.ops.Adagrad(learning_rate=_schedule(0.04, steps)),
    )
    with jrec.distribute(model, optimizer, growing=growing or None) as run:
        step = run.compile()
        for taken in run.feed(batches_of(columns, batch), dense=dense, batch_size=batch):
            step(taken)
        labels = test.pop("label")
        logits = run.predict(test, dense=dense, batch_size=PREDICTED)
    auc = evaluate(Scores(labels=labels, logits=logits)).auc
    assert auc is not None, "the split test has one label only"
    return sum(w.nbytes for w in ways.values()), auc


def _smaller(way: Callable[[str, int, float], Way], name: str, rows: int, most: float) -> Way:
    whole = uncompressed(name, rows, most)
    return whole if rows <= most or (made := way(name, rows, most)).nbytes >= whole.nbytes else made


def most_rows(sizes: Collection[int], ratio: float) -> float:
    """The size that no table may pass so that all together keep their rows by ``ratio``."""
    left = sum(sizes) / ratio
    for number, rows in enumerate(sorted(sizes)):
        larger = len(sizes) - number
        if rows * larger >= left:
            return left / larger
        left -= rows
    return max(sizes)


def _schedule(rate: float, steps: int) -> optax.Schedule:
    """Up for ``WARMUP`` steps, and down to 0, as in configs/criteo_kaggle.toml."""
    parts = [optax.linear_schedule(0, rate, WARMUP), optax.linear_schedule(rate, 0, max(1, steps - WARMUP))]
    return optax.join_schedules(parts, [WARMUP])


def columns_of(data: pathlib.Path, schema: Schema, split: str, ways: Mapping[str, Way]) -> Columns:
    """A split's examples in order of time, with the ids of every table."""
    blocks = [
        reader.read(number)
        for shard in schema.splits[split].shards
        for reader in [ShardReader(data, shard)]
        for number in range(len(reader))
    ]
    read = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    columns = {name: read[name] for name in ("label", *(f.name for f in schema.dense))}
    for name, way in ways.items():
        ids = read[name].reshape(-1).astype(np.int64)
        columns |= {f"{name}{suffix}": of_table for suffix, of_table in way.ids(ids).items()}
    return columns


def batches_of(columns: Columns, size: int) -> Iterator[Columns]:
    """Batches in order; the last is smaller."""
    for begin in range(0, len(columns["label"]), size):
        yield {name: column[begin : begin + size] for name, column in columns.items()}


if __name__ == "__main__":
    main()
