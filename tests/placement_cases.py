"""Every placement that a table test trains: a small log, and what to write behind ``jrec train`` for each of them."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np
from placement_reference import Example, Feature

from jrec import ops
from jrec.access.profile import AccessProfile, TableProfile
from jrec.data.bijection import save_order
from jrec.data.blocks import ListColumn, ShardWriter, shard_file
from jrec.data.fae import HotSet
from jrec.data.schema import CategoricalFeature, DenseFeature, Schema, Split, Table
from jrec.prepare.fae_pack import pack
from jrec.sharding import BASELINES, Plan, Problem, build_plan, plan_placement, save_plan
from jrec.sharding.drift import describe
from jrec.sharding.hardware import grid
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, TT
from jrec.sharding.planner import PlanOptions
from jrec.sharding.problem import tables_of
from jrec.sharding.tiers import tt_option

BATCH, STEPS, DIM, DEVICES = 16, 6, 4, 4
TRAIN, TEST, BLOCK = BATCH * STEPS, 20, 32
ROWS = {"site": 12, "user": 9, "item": 40, "word": 24}
WHOLE_ROWS = 6  # of "word", where only the others lie in cores
RANK = 2
FEATURES = {
    "site": Feature("site", "sum"),
    "user": Feature("user", "mean", 3),
    "item": Feature("item", "sum", 4),
    "seen": Feature("item", "max", 3),
    "word": Feature("word", "sum", 2),
}

CONFIG = f"""
seed = 3
[data]
batch_size = {BATCH}
eval_batch_size = {TEST}
window_blocks = 0
workers = 1
[model]
embedding_dim = {DIM}
bottom_mlp = [{DIM}]
top_mlp = [4, 1]
[model.features]
user = {{pooling = "mean"}}
seen = {{pooling = "max"}}
[optimizer]
name = "adagrad"
learning_rate = 0.1
initial_accumulator = 0.1
eps = 1e-7
[evaluate]
final_splits = ["test"]
[log]
every_steps = 1
tensorboard = false
progress = "off"
"""
FLOOR: dict[str, float] = {"initial_accumulator": 0.1, "eps": 1e-7}
DENSE = ops.Adagrad(learning_rate=0.1, **FLOOR)
# Where a gradient is squared and divided by its root, a floor keeps rounding errors of small gradients small.
OPTIMIZERS = {
    "sgd": (ops.SGD(learning_rate=0.1, max_row_norm=0.02), ()),
    "momentum": (ops.Momentum(learning_rate=0.1, nesterov=True), ("nesterov=true",)),
    "adagrad": (ops.Adagrad(learning_rate=0.1, **FLOOR), ("initial_accumulator=0.1", "eps=1e-7")),
    "rowwise_adagrad": (
        ops.RowWiseAdagrad(learning_rate=0.1, weight_decay=0.01, **FLOOR),
        ("initial_accumulator=0.1", "eps=1e-7"),
    ),
    "rmsprop": (ops.RMSProp(learning_rate=0.01, eps=1e-4), ("eps=1e-4",)),
    "adam": (ops.Adam(learning_rate=0.02, eps=1e-2), ("eps=1e-2",)),
    "rowwise_rmsprop": (ops.RowWiseRMSProp(learning_rate=0.01, eps=1e-4), ("eps=1e-4",)),
    "rowwise_adam": (ops.RowWiseAdam(learning_rate=0.02, eps=1e-2), ("eps=1e-2",)),
}


def optimizer_keys(name: str) -> tuple[str, ...]:
    """Overrides that give the row optimizer of ``OPTIMIZERS``."""
    of, others = OPTIMIZERS[name]
    keys = [f"name={name}", f"learning_rate={of.learning_rate}", f"weight_decay={of.weight_decay}", *others]
    keys += [] if of.max_row_norm is None else [f"max_row_norm={of.max_row_norm}"]
    return tuple(f"optimizer.embedding.{key}" for key in keys)


# The log.


@dataclasses.dataclass(frozen=True)
class Log:
    """A dataset's folder, and its examples as the reference reads them."""

    folder: pathlib.Path
    train: list[Example]
    test: list[Example]


def batches(examples: list, shares: int) -> list[list]:
    """The batches of so many processes, each of which takes an equal part of a batch from its share of the log."""
    size, each = len(examples), BATCH // shares
    of = [examples[p * size // shares : (p + 1) * size // shares] for p in range(shares)]
    return [
        [example for share in of for example in share[begin : begin + each]]
        for begin in range(0, max(map(len, of)), each)
    ]


def write_log(folder: pathlib.Path, *, reordered: bool = False, dealt: int = 1) -> Log:
    """Writes the dataset.

    Args:
      folder: To make.
      reordered: Whether two tables get a bijection, by which the loader renumbers their rows.
      dealt: So that one process takes the batches that so many take of the log that is not dealt.
    """
    folder.mkdir(parents=True)
    rng, splits, examples, orders = np.random.default_rng(0), {}, {}, {}
    tables = {name: Table(name=name, rows=rows) for name, rows in ROWS.items()}
    if reordered:
        for name in ("item", "word"):
            orders[name] = np.random.default_rng(1).permutation(ROWS[name]).astype(np.uint32)
            tables[name] = dataclasses.replace(tables[name], bijection=save_order(folder, name, orders[name]))
    for split, count in (("train", TRAIN), ("test", TEST)):
        columns = _columns(rng, count)
        if split == "train":
            columns = _taken(columns, np.concatenate(batches(list(range(count)), dealt)))
        with ShardWriter(folder / shard_file(split, 0, 1), BLOCK) as writer:
            writer.write(columns)
        splits[split] = Split(shards=(writer.close(),))
        examples[split] = [_example(columns, i, orders) for i in range(count)]
    lists = {n: CategoricalFeature(name=n, table=f.table, max_length=f.length) for n, f in FEATURES.items()}
    lists["item"] = dataclasses.replace(lists["item"], weighted=True)
    site = CategoricalFeature(name="site", table="site", fixed_length=True)
    Schema(
        name="placements",
        block_size=BLOCK,
        dense=(DenseFeature(name="price"), DenseFeature(name="age")),
        categorical=(site, *(lists[name] for name in FEATURES if name != "site")),
        tables=tuple(tables.values()),
        splits=splits,
        provenance={},
    ).save(folder)
    return Log(folder, examples["train"], examples["test"])


def _columns(rng: np.random.Generator, count: int) -> dict:
    columns = {
        "label": rng.integers(0, 2, count).astype(np.float32),
        "price": rng.normal(size=count).astype(np.float32),
        "age": rng.normal(size=count).astype(np.float32),
        "site": (rng.zipf(1.4, count) % ROWS["site"]).astype(np.uint8),
    }
    for name, feature in FEATURES.items():
        if name == "site":
            continue
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, feature.length + 1, count))]).astype(np.int32)
        ids = (rng.zipf(1.3, offsets[-1]) % ROWS[feature.table]).astype(np.uint8)
        columns[name] = ListColumn(offsets, ids)
        if name == "item":
            columns["item:weight"] = ListColumn(offsets, rng.uniform(0.2, 1, offsets[-1]).astype(np.float32))
    return columns


def _taken(columns: dict, order: np.ndarray) -> dict:
    """The examples in another order."""
    found = {}
    for name, column in columns.items():
        if not isinstance(column, ListColumn):
            found[name] = column[order]
            continue
        parts = [column.values[column.offsets[i] : column.offsets[i + 1]] for i in order]
        offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        found[name] = ListColumn(offsets, np.concatenate(parts))
    return found


def _example(columns: dict, i: int, orders: dict[str, np.ndarray]) -> Example:
    bags = {}
    for name, feature in FEATURES.items():
        column, order = columns[name], orders.get(feature.table, np.arange(ROWS[feature.table]))
        if name == "site":
            bags[name] = [(int(column[i]), 1.0)]
            continue
        place = slice(column.offsets[i], column.offsets[i + 1])
        weights = columns["item:weight"].values[place] if name == "item" else np.ones(place.stop - place.start)
        bags[name] = [(int(order[j]), float(w)) for j, w in zip(column.values[place], weights, strict=True)]
    return Example(np.array([columns["price"][i], columns["age"][i]]), bags, float(columns["label"][i]))


# Hot rows and plans.


def hot_rows(share: float) -> dict[str, np.ndarray]:
    """By table the rows that are hot: so much of each table, whichever rows."""
    rng = np.random.default_rng(2)
    return {n: np.sort(rng.permutation(r)[: round(share * r)]).astype(np.uint32) for n, r in ROWS.items()}


def is_hot(example: Example, hot: dict[str, np.ndarray]) -> bool:
    """Whether an example reads hot rows only."""
    return all(row in hot[FEATURES[name].table] for name, bag in example.bags.items() for row, _ in bag)


def write_hot_and_cold(log: Log, folder: pathlib.Path, share: float) -> pathlib.Path:
    """The log's FAE folder, made unless it is there."""
    if not folder.exists():
        pack(log.folder, folder, HotSet(rows=hot_rows(share), dataset=Schema.load(log.folder).identity))
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOf:
    """A plan that gives every row a random owner.

    Attributes:
      devices: How many.
      replicate, host: Shares of the rows that are on all devices, and in host memory.
      cores: Whether "word" lies in tensor-train cores from row ``WHOLE_ROWS`` on.
      tables_on: Devices that keep all the rows while the others compute; empty where every device does both.
      baseline: A baseline of ``jrec.sharding`` that says where rows live, instead of random owners.
    """

    devices: int = DEVICES
    replicate: float = 0.0
    host: float = 0.0
    cores: bool = False
    tables_on: tuple[int, ...] = ()
    baseline: str = ""

    def write(self, path: pathlib.Path, dtype: str = "float32") -> pathlib.Path:
        """Saves it, for rows of a dtype."""
        flat = tuple(TableProfile(name=n, starts=np.array([0, r]), counts=np.array([1.0])) for n, r in ROWS.items())
        problem = Problem(
            tables=tables_of(list(ROWS.items()), DIM, dtype=dtype),
            profile=AccessProfile(tables=flat, examples=1),
            hardware=grid("any", devices=self.devices, memory=2**40, lookup=1.0, within=1.0, all_reduce=1.0, host=1.0),
            batch_size=BATCH,
        )
        if self.baseline:
            save_plan(build_plan(problem, BASELINES[self.baseline](problem)), path)
            return path
        cores = tt_option(problem, "word", RANK, first_rank=WHOLE_ROWS, required=True) if self.cores else None
        options = PlanOptions(tt=() if cores is None else (cores,))
        planned = plan_placement(problem, options)
        plan = build_plan(problem, planned.placement, describe(problem, options, planned))
        save_plan(self._scattered(plan), path)
        return path

    def _scattered(self, plan: Plan) -> Plan:
        rng, total, devices = np.random.default_rng(4), sum(ROWS.values()), self.devices
        start = np.concatenate([np.arange(rows) for rows in ROWS.values()])
        table = np.repeat(np.arange(len(ROWS)), list(ROWS.values()))
        keepers = np.array(self.tables_on or range(devices))
        tier = rng.choice(
            [REPLICATED, HOST, SHARDED], total, p=[self.replicate, self.host, 1 - self.replicate - self.host]
        )
        for t in range(len(ROWS)):
            of = plan.tier[plan.segments_of(t, start[table == t])]
            tier[table == t] = np.where(of == TT, TT, tier[table == t])
        owner = np.where(tier == SHARDED, rng.choice(keepers, total), -1)
        # Rows of one array follow each other there; a tensor train numbers its own rows.
        array = np.where(tier == SHARDED, owner, np.where(tier == TT, -10 - table, -1 - tier))
        offset = np.empty(total, np.int64)
        for group in np.unique(array):
            offset[array == group] = np.arange((array == group).sum())
        everywhere = np.vstack([np.repeat(np.arange(devices)[:, None], devices, axis=1), np.arange(devices)])
        path = np.vstack([everywhere, np.full(devices, -1)]).astype(np.int16)
        way = np.where(tier == SHARDED, owner, np.where(tier == REPLICATED, devices, devices + 1))
        computes = tuple(d not in self.tables_on for d in range(devices)) if self.tables_on else None
        return dataclasses.replace(
            plan,
            first=np.cumsum([0, *ROWS.values()]),
            start=start,
            tier=tier.astype(np.uint8),
            owner=owner.astype(np.int16),
            offset=offset,
            path=path,
            way=way.astype(np.int32),
            computes=computes,
        )


# The table of placements.

_NORM = "optimizer.max_global_norm="

TT_CORES = f"tables.overrides={{word={{tier='tt', rank={RANK}}}}}"
TT_WHOLE = f"tables.overrides={{word={{tier='tt', rank={RANK}, whole_rows={WHOLE_ROWS}}}}}"
TT_WARMUP = 2
TT_CACHE = ("tables.tt.cache.rows=5", f"tables.tt.cache.warmup_steps={TT_WARMUP}", "tables.tt.cache.refresh_every=2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where rows live and who trains them.

    Attributes:
      keys: Overrides of ``CONFIG``.
      plan: The plan of ``plan=``, if any.
      hot: The share of each table that is hot, under ``schedule=fae``; None for a plain run.
      reordered: Whether the dataset's rows are renumbered by the loader.
      shares: How many contiguous shares of the log a batch is taken from, as that many processes take it.
      processes: How many share ``mesh.devices``.
      cores_from: The first row of "word" that lies in cores; None where it is whole.
      trace: The placement whose arrays to compare with, where the plain reference cannot (caches); the bits must be
        equal where ``exact``.
      exact: Whether no float32 sum is taken in another order than by ``trace``.
      late: Whether only slow tests train it, since others train what it is made of.
    """

    keys: tuple[str, ...] = ()
    plan: PlanOf | None = None
    hot: float | None = None
    reordered: bool = False
    shares: int = 1
    processes: int = 1
    cores_from: int | None = None
    trace: str | None = None
    exact: bool = False
    late: bool = False

    @property
    def devices(self) -> int:
        """How many train."""
        given = [key.removeprefix("mesh.devices=") for key in self.keys if key.startswith("mesh.devices=")]
        return int(given[0]) if given else self.plan.devices if self.plan else 1

    @property
    def pooling_keys(self) -> tuple[str, ...]:
        """Those keys that say how features are pooled."""
        return tuple(key for key in self.keys if key.startswith("model.features."))

    @property
    def features(self) -> dict[str, Feature]:
        """``FEATURES``, pooled as the keys say."""
        given = dict(re.fullmatch(r"model\.features\.(\w+)\.pooling=(\w+)", key).groups() for key in self.pooling_keys)
        return {name: dataclasses.replace(of, pooling=given.get(name, of.pooling)) for name, of in FEATURES.items()}

    @property
    def max_global_norm(self) -> float:
        """The norm to which gradients are clipped; infinite where they are not."""
        given = [key.removeprefix(_NORM) for key in self.keys if key.startswith(_NORM)]
        return float(given[0]) if given else np.inf


def _mesh(devices: int = DEVICES, **keys: str) -> tuple[str, ...]:
    return (f"mesh.devices={devices}", *(f"mesh.{key}={value}" for key, value in keys.items()))


WORD_MAX = "model.features.word.pooling=max"
SEQUENCES = tuple(f"model.features.{name}.pooling=none" for name in ("user", "item"))
CLIPPED = f"{_NORM}0.1"
HOST_TABLES = "tables.tier=host"
PIPELINE = "tables.host.pipeline=on"
HOST_ITEM = "tables.overrides={item={tier='host'}}"
HOST_ITEM_TT = f"tables.overrides={{item={{tier='host'}}, word={{tier='tt', rank={RANK}, whole_rows={WHOLE_ROWS}}}}}"
REPLICATED_ITEM = "tables.overrides={item={tier='replicated'}}"
SCATTERED = PlanOf(replicate=0.3)
WITH_HOST = PlanOf(replicate=0.2, host=0.4)
FOUR_TIERS = PlanOf(replicate=0.2, host=0.3, cores=True)
APART = PlanOf(tables_on=(0, 3))

PLACEMENTS = {
    "device": Placement(),
    "tt": Placement(keys=(TT_CORES,), cores_from=0),
    "tt-whole": Placement(keys=(TT_WHOLE,), cores_from=WHOLE_ROWS, reordered=True, late=True),
    "tt-cache": Placement(keys=(TT_CORES, *TT_CACHE), cores_from=0, trace="tt-cache"),
    "tt-whole-cache": Placement(
        keys=(TT_WHOLE, *TT_CACHE), cores_from=WHOLE_ROWS, trace="tt-whole-cache", reordered=True, late=True
    ),
    "tt-cache-shared": Placement(keys=(TT_CORES, *TT_CACHE), cores_from=0, shares=2, trace="tt-cache-shared"),
    "host": Placement(keys=(HOST_TABLES,), reordered=True),
    "host-queue-1": Placement(
        keys=(HOST_TABLES, PIPELINE, "tables.host.queue=1"), trace="host", exact=True, reordered=True
    ),
    "host-whole-cache": Placement(
        keys=(HOST_ITEM_TT, *TT_CACHE), cores_from=WHOLE_ROWS, trace="tt-whole-cache", reordered=True, late=True
    ),
    "mesh-retrieve": Placement(keys=_mesh(form="retrieve"), late=True),
    "mesh-send": Placement(keys=_mesh(form="send"), reordered=True),
    "mesh-replicated": Placement(keys=(*_mesh(2), "tables.tier=replicated"), late=True),
    "mesh-host": Placement(keys=(*_mesh(2), HOST_TABLES), late=True),
    "plan-local": Placement(keys=_mesh(reduce="local"), plan=SCATTERED, late=True),
    "plan-dense": Placement(keys=_mesh(reduce="dense"), plan=SCATTERED, reordered=True),
    "plan-all-gather": Placement(keys=_mesh(2, reduce="all_gather"), plan=PlanOf(devices=2, replicate=0.6), late=True),
    "plan-eight": Placement(keys=_mesh(8), plan=PlanOf(devices=8, replicate=0.2)),
    "plan-host": Placement(keys=_mesh(form="send"), plan=WITH_HOST, reordered=True),
    "plan-host-table": Placement(keys=(*_mesh(), HOST_ITEM), plan=WITH_HOST, late=True),
    "plan-replicated-table": Placement(keys=(*_mesh(), REPLICATED_ITEM), plan=WITH_HOST, late=True),
    "plan-four-tiers": Placement(keys=(*_mesh(), TT_WHOLE), plan=FOUR_TIERS, cores_from=WHOLE_ROWS),
    "plan-four-tiers-alone": Placement(keys=_mesh(), plan=FOUR_TIERS, cores_from=WHOLE_ROWS, reordered=True, late=True),
    "plan-four-tiers-cache": Placement(
        keys=(*_mesh(), TT_WHOLE, *TT_CACHE),
        plan=FOUR_TIERS,
        cores_from=WHOLE_ROWS,
        trace="tt-whole-cache",
        reordered=True,
    ),
    "tables-on": Placement(keys=_mesh(), plan=APART, reordered=True),
    "tables-on-whole-cache": Placement(
        keys=(*_mesh(form="retrieve"), TT_WHOLE, *TT_CACHE),
        plan=dataclasses.replace(APART, cores=True),
        cores_from=WHOLE_ROWS,
        trace="tt-whole-cache",
        reordered=True,
        late=True,
    ),
    "tables-on-host": Placement(keys=(*_mesh(), HOST_ITEM), plan=APART, late=True),
    "tables-on-host-rows": Placement(keys=_mesh(), plan=dataclasses.replace(APART, host=0.4)),
    "one-plan": Placement(plan=PlanOf(devices=1, host=0.4)),
    "fae-plan": Placement(keys=_mesh(), plan=WITH_HOST, hot=0.7, late=True),
    "fae-tables-on": Placement(keys=_mesh(), plan=APART, hot=0.7, late=True),
    "fae": Placement(hot=0.7, reordered=True),
    "fae-tt": Placement(keys=(TT_CORES,), hot=0.7, cores_from=0, late=True),
    "fae-tt-whole": Placement(keys=(TT_WHOLE,), hot=0.7, cores_from=WHOLE_ROWS, reordered=True, late=True),
    "fae-tt-cache": Placement(keys=(TT_CORES, *TT_CACHE), hot=0.7, cores_from=0, trace="fae-tt-cache"),
    "fae-four-tiers": Placement(keys=(*_mesh(), TT_WHOLE), plan=FOUR_TIERS, hot=0.7, cores_from=WHOLE_ROWS),
    "fae-all-hot": Placement(hot=1.0),
    "fae-none-hot": Placement(hot=0.0),
    "fae-mesh": Placement(keys=_mesh(), hot=0.7),
    "processes": Placement(keys=_mesh(form="retrieve"), shares=2, processes=2, reordered=True),
    "processes-tables-on": Placement(keys=_mesh(), plan=PlanOf(tables_on=(1, 3)), shares=2, processes=2),
    "processes-whole": Placement(keys=(*_mesh(), TT_WHOLE), shares=2, processes=2, cores_from=WHOLE_ROWS),
    "processes-host": Placement(keys=(*_mesh(), HOST_TABLES), shares=2, processes=2),
    "processes-host-rows": Placement(
        keys=(*_mesh(), TT_WHOLE), plan=FOUR_TIERS, shares=2, processes=2, cores_from=WHOLE_ROWS, reordered=True
    ),
    "processes-host-cache": Placement(
        keys=(*_mesh(form="send"), TT_CORES, *TT_CACHE, "tables.tier=host"),
        shares=2,
        processes=2,
        cores_from=0,
        trace="tt-cache-shared",
    ),
    "processes-fae": Placement(keys=_mesh(), plan=WITH_HOST, hot=0.7, shares=2, processes=2),
    "processes-four-host": Placement(keys=(*_mesh(), HOST_TABLES), shares=4, processes=4),
    "processes-four-fae": Placement(
        keys=(*_mesh(), TT_WHOLE), plan=FOUR_TIERS, hot=0.7, shares=4, processes=4, cores_from=WHOLE_ROWS
    ),
    "processes-cache": Placement(
        keys=(*_mesh(form="send"), TT_CORES, *TT_CACHE), shares=2, processes=2, cores_from=0, trace="tt-cache-shared"
    ),
    "sequences": Placement(keys=(TT_WHOLE, WORD_MAX, *SEQUENCES), cores_from=WHOLE_ROWS, reordered=True),
    "tt-max-cache": Placement(keys=(TT_CORES, WORD_MAX, *TT_CACHE), cores_from=0, trace="tt-max-cache", late=True),
    "mesh-max-cache": Placement(
        keys=(*_mesh(), TT_CORES, WORD_MAX, *TT_CACHE), cores_from=0, trace="tt-max-cache", late=True
    ),
    "tt-sequences": Placement(keys=(TT_CORES, "model.features.word.pooling=none"), cores_from=0, late=True),
    "plan-host-sequences": Placement(keys=(*_mesh(form="send"), *SEQUENCES), plan=WITH_HOST, reordered=True, late=True),
    "clipped": Placement(keys=(TT_CORES, CLIPPED), cores_from=0, late=True),
    "clipped-cache": Placement(keys=(TT_CORES, CLIPPED, *TT_CACHE), cores_from=0, trace="clipped-cache", late=True),
    "host-sequences": Placement(keys=(HOST_TABLES, WORD_MAX, *SEQUENCES), reordered=True, late=True),
    "host-clipped": Placement(keys=(HOST_TABLES, CLIPPED), late=True),
    "plan-dense-clipped": Placement(keys=(*_mesh(reduce="dense"), CLIPPED), plan=SCATTERED, late=True),
    "plan-all-gather-clipped": Placement(
        keys=(*_mesh(2, reduce="all_gather"), CLIPPED), plan=PlanOf(devices=2, replicate=0.6)
    ),
    "plan-clipped-cache": Placement(
        keys=(*_mesh(), TT_CORES, CLIPPED, *TT_CACHE), plan=SCATTERED, cores_from=0, trace="clipped-cache", late=True
    ),
    "tables-on-clipped": Placement(
        keys=(*_mesh(), TT_WHOLE, CLIPPED),
        plan=dataclasses.replace(APART, cores=True),
        cores_from=WHOLE_ROWS,
        late=True,
    ),
    "fae-mesh-clipped": Placement(
        keys=(*_mesh(), TT_CORES, WORD_MAX, *SEQUENCES, CLIPPED), hot=0.7, cores_from=0, late=True
    ),
    "processes-clipped": Placement(keys=(*_mesh(), TT_CORES, CLIPPED), shares=2, processes=2, cores_from=0, late=True),
    "one-plan-clipped": Placement(keys=(CLIPPED,), plan=PlanOf(devices=1, replicate=1.0), late=True),
    "plan-four-tiers-all": Placement(
        keys=(*_mesh(form="send"), TT_WHOLE, WORD_MAX, SEQUENCES[0], CLIPPED), plan=FOUR_TIERS, cores_from=WHOLE_ROWS
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """A run that stops and goes on in another placement, with the same keys of ``[tables]``.

    Attributes:
      steps: Names of placements in turn, each with the step at which it stops.
      reordered: Of the dataset.
      trace: The placement whose uninterrupted run it must follow; None for the plain reference.
      dtype: Of the rows.
    """

    steps: tuple[tuple[str, int], ...]
    reordered: bool = True
    trace: str | None = None
    dtype: str = "float32"

    def placements(self) -> list[Placement]:
        """Where it trains."""
        return [dataclasses.replace(PLACEMENTS[name], reordered=self.reordered) for name, _ in self.steps]


MOVES = {
    "uncompressed": Move(
        steps=(("device", 1), ("mesh-send", 2), ("plan-host", 3), ("tables-on", 4), ("plan-local", 5), ("device", 6))
    ),
    "cores": Move(steps=(("tt-whole", 2), ("plan-four-tiers", 4), ("tt-whole", 6))),
    "caches": Move(
        steps=(("tt-whole-cache", 2), ("plan-four-tiers-cache", 4), ("tables-on-whole-cache", 6)),
        trace="tt-whole-cache",
    ),
    "host tables": Move(steps=(("host", 2), ("mesh-host", 4), ("host-queue-1", 6))),
    "hot rows": Move(steps=(("fae", 3), ("fae-mesh", 5), ("fae", 99))),
    "fewer processes": Move(steps=(("processes", 2), ("mesh-retrieve", 4), ("device", 6))),
    "fewer processes with caches": Move(
        steps=(("processes-cache", 3), ("tt-cache-shared", 6)), reordered=False, trace="tt-cache-shared"
    ),
    "four tiers, fewer processes": Move(
        steps=(("processes-host-rows", 2), ("plan-four-tiers", 4), ("processes-host-rows", 6))
    ),
    "hot rows, fewer processes": Move(steps=(("processes-fae", 3), ("fae-plan", 5), ("processes-fae", 99))),
    "16 bits": Move(
        steps=(("mesh-retrieve", 2), ("device", 3), ("plan-host", 4), ("plan-local", 6)),
        trace="device",
        dtype="bfloat16",
    ),
}
COMPRESSED = {  # dtype of the run's rows
    "tt-whole": "bfloat16",
    "tt-cache": "float32",
    "host": "float32",
    "host-whole-cache": "bfloat16",
    "plan-host": "float32",
    "tables-on": "float32",
    "fae": "float32",
    "processes": "float32",
}
