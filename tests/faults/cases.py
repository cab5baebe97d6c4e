"""The commands that are tried, on a log of 300 lines: what is made before, what is run, what counts of its outputs."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import pathlib
import random
from collections.abc import Callable

import numpy as np

COLUMNS = """\
[label]
column = "label"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
TASKS = COLUMNS.replace('[label]\ncolumn = "label"', '[[labels]]\ncolumn = "clicked"\n[[labels]]\ncolumn = "bought"')
PLAYS = """\
[time]
column = "at"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
[[categorical]]
column = "history"
history = {by = "user", of = "item", length = 4}
"""
MEANS = f"""{COLUMNS}
[[cross]]
of = ["user", "item"]
[[target_mean]]
of = ["user_item"]
min_count = 1
"""
RUN = """\
max_steps = 4
[data]
path = "data"
batch_size = 32
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [1]
[optimizer]
learning_rate = 0.1
[checkpoint]
every_steps = 2
[log]
every_steps = 1
tensorboard = false
progress = "off"
[evaluate]
baselines = "off"
"""
MACHINE = 'name = "two"\ndevices = 2\nmemory = "1GB"\nlookup = "1TB/s"\nwithin = 1e11\nall_reduce = "20GB/s"\n'

PREPARE = "jrec prepare csv --schema columns.toml --input log.csv --out data --quiet"
TRAIN = "jrec train run.toml out=run"
_RANKS = f"{TRAIN} model.bottom_mlp=[64,16] model.top_mlp=[64,1] evaluate.every_steps=2"
TOWERS = (
    f"{_RANKS} model.kind=two_tower model.two_tower.user=['user'] model.two_tower.item=['item','price']"
    " model.two_tower.id=item"
)
NEXT_ITEM = f"{_RANKS} model.kind=hstu model.sequence.sampled=4"
SEVERAL = f"{TRAIN} model.top_mlp=[4,1] model.multi_task.tower_mlp=[4]"
GROWING = f"{TRAIN} tables.growth.capacity=8"
FOLLOW = "jrec follow run --input incoming --out live --once --settle 0 --every 0"
TASKS_PREPARE = "jrec prepare csv --schema tasks.toml --input wide.csv --out data --quiet"
MEANS_PREPARE = "jrec prepare csv --schema means.toml --input log.csv --out data --quiet"
PLAYS_PREPARE = (
    "jrec prepare csv --schema plays.toml --input wide.csv --no-labels --split-by leave-one-out --out data --quiet"
)
EXPORT = "jrec export run --out export --quiet"
LATER = "jrec train run.toml out=run max_steps=8 --resume"
DELTA = "jrec export run --since export --out delta --quiet"
UNFINISHED = (
    "*.partial",
    "*.partial/*",
    ".*.lock",
    "*/.*.lock",
    "*/.lock",
    "*.replaced",
    "*.replaced/*",
    "*.removed",
    "*.removed/*",
)


MODES = ("full disk", "failing write", "failing read", "half", "SIGINT", "SIGTERM", "SIGKILL", "two SIGINT")
"""The faults, see ``harness.MODES``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A command that is tried.

    Attributes:
      command: What is run, words apart; "jrec …", or a module and a function.
      setup: The commands before it, of which the last may leave an older output.
      outputs: Files and folders that it makes.
      leaves_out: Patterns of files in them that differ from run to run.
      recover: What is run after a failure; by default the command.
      modules: What the process has loaded before it starts.
      partly: Whether what a failure leaves may be a beginning that ``recover`` goes on with, as of a run.
      devices: Virtual devices.
      read: What of an output counts, where that is not every byte.
      within: The folder whose files faults are about.
      modes: The faults that can be.
    """

    command: str
    setup: tuple[str, ...] = (PREPARE,)
    outputs: tuple[str, ...]
    leaves_out: tuple[str, ...] = ()
    recover: str | None = None
    modules: tuple[str, ...] = ()
    partly: bool = False
    devices: int = 1
    read: Callable[[pathlib.Path], dict[str, bytes]] | None = None
    within: str = ""
    modes: tuple[str, ...] = MODES

    def state(self, folder: pathlib.Path) -> dict[str, str]:
        """SHA-256 of the finished files that are there, by path, or of what ``read`` finds in them."""
        found = {}
        for output in self.outputs:
            found |= self._files(folder, output) if self.read is None else self.read(folder / output)
        return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}

    def _files(self, folder: pathlib.Path, output: str) -> dict[str, bytes]:
        top = folder / output
        paths = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        left_out = (*UNFINISHED, *self.leaves_out)
        return {n: p.read_bytes() for n, p in names.items() if not any(fnmatch.fnmatch(n, one) for one in left_out)}


def _trained(run: pathlib.Path) -> dict[str, bytes]:
    """The latest checkpoint's content, however it is stored, the metrics, and whether there is a report."""
    from checkpoint_state import contents, latest

    from jrec.checkpoint import Checkpoints

    if Checkpoints(run / "checkpoints").latest_step() is None:
        return {}
    report = str((run / "report/metrics.json").is_file()).encode()
    return {**contents(latest(run)), "metrics": (run / "metrics.jsonl").read_bytes(), "report": report}


def _with_catalogue(run: pathlib.Path) -> dict[str, bytes]:
    """Of two towers also the items that are ranked."""
    path, found = run / "catalogue", _trained(run)
    return {**found, "catalogue": path.read_bytes()} if path.is_file() and found else found


TIMES = ("*/timing.jsonl", "*/report/*", "*/manifest.json")  # seconds, versions of figures, seconds again
_DATA = (
    "jrec.app.commands.prepare",
    "jrec.prepare.prepare",
    "jrec.prepare.joined",
    "numba",
    "jrec.prepare.reorder",
    "pandas",
    "scipy.linalg",
)
_MODEL = (*_DATA, "jrec.app.loop", "jrec.app.report", "jrec.app.predict",
          "jrec.app.export", "jrec.serving.model", "jrec.app.imports", "jrec.app.compress", "jrec.app.preflight",
          "jrec.app.comparisons", "jrec.app.commands.kernel_check", "jrec.selfcheck.check", "optax")  # fmt: skip

CASES = {
    "prepare": Case(
        command=f"{PREPARE} --overwrite", setup=(f"{PREPARE} --split 0.5,0.25,0.25",), outputs=("data",), modules=_DATA
    ),
    "prepare target means": Case(
        command=f"{MEANS_PREPARE} --overwrite", setup=(f"{MEANS_PREPARE} --split 0.5,0.25,0.25",), outputs=("data",),
        modules=_DATA,
    ),
    "access": Case(
        command="jrec access data --split test --out profile --quiet",
        setup=(PREPARE, "jrec access data --out profile --quiet"), outputs=("profile",), modules=_DATA,
    ),
    "plan": Case(
        command="jrec plan data --hardware machine.toml --dim 8 --out plan --figure none",
        setup=(PREPARE, "jrec plan data --hardware machine.toml --dim 4 --out plan --figure none"), outputs=("plan",),
        modules=(*_DATA, "jrec.app.commands.plan", "jrec.sharding.planner", "scipy.optimize"),
    ),
    "replan": Case(
        command="jrec replan plan profile --min-gain -1 --out replanned",
        setup=(
            PREPARE, "jrec access data --split test --out profile --quiet",
            *(f"jrec plan data --hardware machine.toml --dim {dim} --out {out} --figure none"
              for dim, out in ((8, "plan"), (4, "replanned"))),
        ),
        outputs=("replanned",), modules=(*_DATA, "jrec.sharding.drift", "scipy.optimize"),
    ),
    "reorder": Case(
        command="jrec reorder data --min-rows 4 --always --quiet", outputs=("data",), leaves_out=("*/reorder/*.*",),
        modules=(*_DATA, "jrec.prepare.reorder.driver", "igraph"),
    ),
    "fae calibrate": Case(
        command="jrec fae calibrate data --budget 300B --small 10B --out hot --quiet",
        setup=(PREPARE, "jrec fae calibrate data --budget 900B --small 10B --out hot --quiet"), outputs=("hot",),
        modules=(*_DATA, "jrec.access.calibrate"),
    ),
    "fae pack": Case(
        command="jrec fae pack data --budget 300B --small 10B --out fae --overwrite --quiet",
        setup=(PREPARE, "jrec fae pack data --budget 900B --small 10B --out fae --quiet"), outputs=("fae",),
        modules=(*_DATA, "jrec.access.calibrate", "jrec.prepare.fae_pack"),
    ),
    "init": Case(
        command="jrec init data --out first.toml --quick --overwrite", outputs=("first.toml", "first.html"),
        modules=_MODEL, partly=True,  # a new page beside the old configuration, until the same command runs again
    ),
    "train": Case(
        command=TRAIN, outputs=("run",), read=_trained, recover=f"{TRAIN} --resume", modules=_MODEL, partly=True
    ),
    "train in host memory": Case(
        command=f"{TRAIN} tables.tier=host", outputs=("run",), read=_trained,
        recover=f"{TRAIN} tables.tier=host --resume", modules=_MODEL, partly=True,
    ),
    "train on a mesh": Case(
        command=f"{TRAIN} mesh.devices=2", outputs=("run",), read=_trained,
        recover=f"{TRAIN} mesh.devices=2 --resume", modules=_MODEL, partly=True, devices=2,
    ),
    "train growing tables": Case(
        command=GROWING, setup=(f"{PREPARE} --growing user",), outputs=("run",), read=_trained,
        recover=f"{GROWING} --resume", modules=_MODEL, partly=True,
    ),
    "train several labels": Case(
        command=SEVERAL, setup=(TASKS_PREPARE,), outputs=("run",), read=_trained, recover=f"{SEVERAL} --resume",
        modules=_MODEL, partly=True,
    ),
    "train the next item": Case(
        command=NEXT_ITEM, setup=(PLAYS_PREPARE,), outputs=("run",), read=_trained,
        recover=f"{NEXT_ITEM} --resume", modules=_MODEL, partly=True,
    ),
    "eval": Case(
        command="jrec eval run data --out report",
        setup=(PREPARE, TRAIN, "jrec eval run data --split train --out report"),
        outputs=("report",), modules=_MODEL, partly=True,  # a new page beside the old figures
    ),
    "checkpoints": Case(
        command="save_checkpoints main", setup=(), outputs=("saved",), modules=("save_checkpoints", "optax"),
        partly=True,
    ),
    "predict": Case(
        command="jrec predict run log.csv --out scores.parquet --overwrite --quiet",
        setup=(PREPARE, TRAIN, "jrec predict run/checkpoints/2 log.csv --out scores.parquet --quiet"),
        outputs=("scores.parquet",), modules=_MODEL,
    ),
    "predict csv": Case(
        command="jrec predict run data --out scores.csv --quiet", setup=(PREPARE, TRAIN), outputs=("scores.csv",),
        modules=_MODEL,
    ),
    "export": Case(
        command=f"{EXPORT} --overwrite", setup=(PREPARE, TRAIN, f"{EXPORT} --dtype int8"), outputs=("export",),
        modules=_MODEL,
    ),
    "delta": Case(command=DELTA, setup=(PREPARE, TRAIN, EXPORT, LATER), outputs=("delta",), modules=_MODEL),
    "apply": Case(
        command="apply_delta main", setup=(PREPARE, TRAIN, EXPORT, LATER, DELTA), outputs=("said",), modules=_MODEL,
        within="delta", modes=("failing read", "half", "SIGINT", "SIGTERM", "two SIGINT"),
    ),
    "serve": Case(
        command="serve_delta main", setup=(PREPARE, TRAIN, EXPORT, LATER, DELTA), outputs=("said",),
        modules=_MODEL, within="deltas",
        modes=("failing read", "half", "SIGINT", "SIGTERM", "two SIGINT"),
    ),
    "compress": Case(
        command="jrec compress run --rank 2 --tables user --out small --overwrite --quiet",
        setup=(PREPARE, TRAIN, "jrec compress run --rank 1 --tables user --out small --quiet"),
        outputs=("small",), leaves_out=TIMES, modules=_MODEL,
    ),
    "import-dlrm": Case(
        command="jrec import-dlrm dlrm.pt data --rows numbers --out imported --overwrite",
        setup=(PREPARE, "jrec import-dlrm dlrm.pt data --rows numbers --out imported seed=1"), outputs=("imported",),
        leaves_out=TIMES, modules=_MODEL,
    ),
    "train two towers": Case(
        command=TOWERS, outputs=("run",), read=_with_catalogue, recover=f"{TOWERS} --resume", modules=_MODEL,
        partly=True,
    ),
    "predict two towers": Case(
        command="jrec predict run log.csv --k 3 --out best.parquet --overwrite --quiet",
        setup=(PREPARE, TOWERS, "jrec predict run log.csv --k 2 --out best.parquet --quiet"),
        outputs=("best.parquet",), modules=_MODEL,
    ),
    "export two towers": Case(
        command=f"{EXPORT} --overwrite", setup=(PREPARE, TOWERS, f"{EXPORT} --dtype int8"), outputs=("export",),
        modules=_MODEL,
    ),
    "follow": Case(
        command=FOLLOW, setup=(f"{PREPARE} --growing user", GROWING), outputs=("live",), read=_trained,
        recover=f"{FOLLOW} --resume", modules=(*_MODEL, "jrec.app.follow"), partly=True,
    ),
}  # fmt: skip


def write_inputs(folder: pathlib.Path) -> None:
    """Writes what all cases begin with: a log, the description of its columns, of a machine, of a run, and a DLRM."""
    draw = random.Random(0)
    lines = [
        f"{draw.randint(0, 1)},{draw.random():.4f},u{draw.randint(0, 20)},i{draw.randint(0, 9)}" for _ in range(300)
    ]
    (folder / "log.csv").write_text("\n".join(["label,price,user,item", *lines]) + "\n")
    (folder / "incoming").mkdir()
    for part in (1, 2):
        chosen = lines[100 * part : 100 * part + 40]
        (folder / "incoming" / f"part-{part}.csv").write_text("\n".join(["label,price,user,item", *chosen]) + "\n")
    wide = [f"{at},{draw.randint(0, 1)},{line}" for at, line in enumerate(lines)]
    (folder / "wide.csv").write_text("\n".join(["at,bought,clicked,price,user,item", *wide]) + "\n")
    (folder / "columns.toml").write_text(COLUMNS)
    (folder / "tasks.toml").write_text(TASKS)
    (folder / "plays.toml").write_text(PLAYS)
    (folder / "means.toml").write_text(MEANS)
    (folder / "run.toml").write_text(RUN)
    (folder / "machine.toml").write_text(MACHINE)


def write_dlrm(folder: pathlib.Path) -> None:
    """Writes a DLRM of the dataset's shape, as torch.save does, and that its rows are the dataset's."""
    import torch_files

    tables = json.loads((folder / "data/schema.json").read_text())["tables"]
    (folder / "numbers").mkdir()
    for table in tables:
        np.save(folder / f"numbers/{table['name']}.npy", np.arange(table["rows"]))
    draw = np.random.default_rng(0)
    shapes = {f"emb_l.{n}.weight": (table["rows"], 4) for n, table in enumerate(tables)}
    shapes |= {"bot_l.0.weight": (4, 1), "bot_l.0.bias": (4,), "top_l.0.weight": (1, 7), "top_l.0.bias": (1,)}
    torch_files.save(folder / "dlrm.pt", {name: draw.normal(size=shape).astype("f4") for name, shape in shapes.items()})
