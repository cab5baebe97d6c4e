"""What models and their training may have besides rows, and where each is trained: for tests and their table."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import shop_logs
from checkpoint_state import latest
from fae_cases import packed

from jrec import cli
from jrec.access.profile import AccessProfile, TableProfile
from jrec.app.build import build_layout
from jrec.app.config import TrainConfig
from jrec.data.schema import Schema
from jrec.sharding import Problem, build_plan, plan_placement, save_plan
from jrec.sharding.hardware import grid
from jrec.sharding.of_layout import plan_tables_of
from jrec.sharding.planner import PlanOptions

SCHEMA = f"""{shop_logs.TWO_FEATURES}
[[categorical]]
column = "history"
table = "item"
separator = "|"
max_length = 5
too_long = "last"
"""
SMALL = (
    "data.batch_size=32", "data.window_blocks=0", "log.every_steps=1", "checkpoint.every_steps=3", "checkpoint.keep=9",
    "evaluate.final_splits=['test']",
)  # fmt: skip
GROWS, DRAWS = "tables that grow", "`model.dropout`"
MODELS = {
    GROWS: ("tables.growth.capacity=25", "tables.growth.admit_after=2"),
    "TBSM": (
        "model.kind=tbsm", "model.top_mlp=[12,1]", "model.tbsm.histories={item='history'}",
        "model.tbsm.tower_mlp=[8,7]", "model.tbsm.attention_mlp=[6]",
    ),
    "DIN": ("model.kind=din", "model.din.histories={item='history'}", "model.din.attention_mlp=[6]"),
    "`model.wide`": ("model.wide=true",),
    "`model.members`": ("model.members=2",),
    # The gradient of a bias before a norm is a rounding error, which other optimizers scale up.
    "`model.batch_norm`": ("model.batch_norm=true", "optimizer.name=sgd", "optimizer.learning_rate=0.1"),
    DRAWS: ("model.dropout=0.2",),
    "`data.micro_batches`": ("data.micro_batches=2",),
    "optimizers by table": (
        "optimizer.embedding.tables.user.name=adam", "optimizer.embedding.tables.user.learning_rate=0.01",
        "optimizer.embedding.tables.item.lr_schedule={kind='warmup_linear'}",
    ),
}  # fmt: skip
"""By what a model has, its keys. The tables that grow are of users, so that items may lie in cores.

Every device draws random numbers of its own for ``DRAWS``, so that runs on unlike devices are not alike.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model is trained.

    Attributes:
      features: What it uses, of ``feature_table.NAMES``.
      keys: Overrides.
      like: The place whose run has to be the same, up to the order of sums.
      data: Which dataset: "plain", "fae" (``jrec fae pack``) or "reordered" (``jrec reorder``).
      plan: "host" for a plan with half of the rows in host memory, "apart" for `jrec plan --tables-on`.
    """

    features: frozenset[str]
    keys: tuple[str, ...] = ()
    like: str = "one"
    data: str = "plain"
    plan: str = ""

    @property
    def narrow(self) -> bool:
        """Whether rows have 16 bits."""
        return "16 bits" in self.features


_CORES = (
    "tables.overrides.item={tier='tt', rank=2, whole_rows=6}", "tables.tt.cache.rows=5",
    "tables.tt.cache.warmup_steps=2", "tables.tt.cache.refresh_every=2",
)  # fmt: skip
_MESH = "mesh.devices=4"
_FAE = ("schedule=fae", "fae.batches=1", "fae.split=test")


def _place(features: str, *keys: str, **more) -> Place:
    return Place(features=frozenset(features.split(", ")), keys=keys, **more)


PLACES = {
    "one": _place("one", like=""),
    "host": _place("one, host", "tables.tier=host"),
    "plan": _place("devices, plan, host rows", _MESH, plan="host"),
    "apart": _place("devices, plan, tables-on", _MESH, plan="apart"),
    "cores": _place("one, cores, whole, cache", *_CORES, like=""),
    "cores-plan": _place("devices, cores, whole, cache, plan", *_CORES, _MESH, like="cores"),
    "narrow": _place("one, 16 bits", "model.table_dtype=bfloat16", like=""),
    "narrow-devices": _place("devices, 16 bits", "model.table_dtype=bfloat16", _MESH, like="narrow"),
    "fae": _place("one, fae", *_FAE, data="fae", like=""),
    "fae-plan": _place("devices, plan, host rows, fae", *_FAE, _MESH, data="fae", plan="host", like="fae"),
    "reordered": _place("one, reorder", data="reordered", like=""),
    "reordered-devices": _place("devices, reorder", _MESH, data="reordered", like="reordered"),
}
NEVER = {(GROWS, "fae"), (GROWS, "reorder"), (GROWS, "compress")}
"""What is refused, see ``test_growing_runs``: each needs to know before training which value has which row."""
MOVED = frozenset({"one", "devices", "processes", "resume"})
COMPRESSED = frozenset({"one", "compress", "cores"})


def trained() -> dict[str, frozenset[str]]:
    """By what a model has, the placements' features with which some test trains it."""
    found = {}
    for model in MODELS:
        features = frozenset().union(*(place.features for place in places_of(model).values()), MOVED)
        found[model] = features | (frozenset() if (model, "compress") in NEVER else COMPRESSED)
    return found


def places_of(model: str) -> dict[str, Place]:
    """The places where a model is trained."""
    return {n: p for n, p in PLACES.items() if not any((model, feature) in NEVER for feature in p.features)}


def prepare(folder: pathlib.Path) -> None:
    """Writes the datasets: "plain" and "growing", and of the former "fae" and "reordered"."""
    shop_logs.write_log(folder / "log.csv", 400)
    (folder / "schema.toml").write_text(SCHEMA)
    command = ["prepare", "csv", "--schema", str(folder / "schema.toml"), "--input", str(folder / "log.csv"), "--quiet"]
    for name, options in (("plain", []), ("growing", ["--growing", "user"])):
        assert cli.main([*command, "--out", str(folder / name), *options]) == 0
    packed(folder / "plain", folder / "fae", lambda table: 0.7)
    reorder = ["--out", str(folder / "reordered"), "--always", "--min-rows", "1", "--batch-size", "32", "--quiet"]
    assert cli.main(["reorder", str(folder / "plain"), *reorder]) == 0


def write_plan(kind: str, config: TrainConfig, path: pathlib.Path) -> None:
    """Writes a plan of the kind for a run's tables."""
    if kind == "apart":
        file = path.with_suffix(".toml")
        file.write_text(config.to_toml())
        hardware = ["--hardware", "h200x8", "--devices", "4", "--tables-on", "0,3", "--figure", "none"]
        arguments = [config.data.path, "--config", str(file), *hardware, "--out", str(path)]
        assert cli.main(["plan", *arguments]) == 0
        return
    tables = plan_tables_of(build_layout(config, Schema.load(config.data.path)), None)
    each = sum(table.rows * table.memory_bytes for table in tables) // 8  # half of the rows fit on four devices
    problem = Problem(
        tables=tables,
        profile=AccessProfile(tables=tuple(TableProfile.uniform(t.name, t.rows, t.rows) for t in tables), examples=1),
        hardware=grid("any", devices=4, memory=each, lookup=1.0, within=1.0, all_reduce=1.0, host=1.0),
        batch_size=32,
    )
    plan = build_plan(problem, plan_placement(problem, PlanOptions()).placement)
    assert plan.rows_in("host")
    save_plan(plan, path)


def arrays_of(run: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of a run's last checkpoint but metrics: dense ones, vocabularies, and rows and slots of tables."""
    saved = latest(run)
    found = {name: array for name, array in saved.arrays().items() if _is_state(name)}
    for table, record in saved.manifest.tables.items():
        for name in ("values", *record.shape.slots):
            rows = np.arange(record.shape.rows)
            found[f"{table}/{name}"] = np.asarray(saved.table(table).read(name, rows), np.float32)
    return found


def _is_state(name: str) -> bool:
    return not name.startswith("progress.") or name.startswith("progress.growing.")
