"""An export of every kind of table with the deltas that follow it, for tests of serving; and how to seal one anew."""

import json
import pathlib
from collections.abc import Callable, Sequence

import shop_logs

from jrec.app.export import export_run
from jrec.data.schema import SCHEMA_FILE
from jrec.files import _seal, sha256_of
from jrec.serving.format import MANIFEST, identity

SIZES = (4, 16)  # batch sizes, which cost a compilation each
_RUN = (
    "checkpoint.every_steps=1",
    "checkpoint.keep=20",
    "data.batch_size=8",
    "max_steps=3",
    "tables.tt.min_rows=20",
    "tables.tt.rank=2",
    "tables.tt.whole_rows=30",
    "tables.tt.cache.rows=8",
    "tables.tt.cache.warmup_steps=1",
    'model.features={history={pooling="none"}}',
)


def made_exports(folder: pathlib.Path, deltas: Sequence[str] = ("delta1", "delta2")) -> pathlib.Path:
    """Makes ``whole`` and the deltas that follow it in the folder, of int8 rows; returns the folder.

    Table "user" grows, and deltas hold its changed rows; "item" has rows first and then cores with cached rows, read by
    a pooled feature and by "history", which is weighted and not pooled.
    """
    shop_logs.write_log(folder / "log.csv", 600)
    dataset = shop_logs.prepare(folder, folder / "log.csv", "data", "--growing", "user")
    run = shop_logs.trained(folder, dataset, *_RUN)
    made: list[pathlib.Path] = []
    for step, name in enumerate(("whole", *deltas), 1):
        export_run(run / "checkpoints" / str(step), folder / name, dtype="int8", since=made)
        made.append(folder / name)
    return folder


def reseal(
    folder: pathlib.Path,
    change: Callable[[dict], object] = lambda content: None,
    files: Sequence[str] = (),
    *,
    own_id: bool = True,
) -> None:
    """Changes a manifest, and seals it as `jrec export` does.

    Args:
      folder: The export.
      change: Changes the content in place.
      files: Files whose checksums are computed anew.
      own_id: Whether the id is computed anew as well.
    """
    content = json.loads((folder / MANIFEST).read_text())
    content["files"] |= {file: sha256_of(folder / file) for file in files}
    change(content)
    if own_id:
        content["id"] = identity({k: v for k, v in content.items() if k not in ("format", "version", "sha256")})
    (folder / MANIFEST).write_text(json.dumps(sealed(content)))


def seal_schema(folder: pathlib.Path, change: Callable[[dict], object]) -> None:
    """Changes ``schema.json``, and seals it."""
    content = json.loads((folder / SCHEMA_FILE).read_text())
    change(content)
    (folder / SCHEMA_FILE).write_text(json.dumps(sealed(content)))


def sealed(content: dict) -> dict:
    """Content with the checksum that fits it."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    return content | {"sha256": _seal(content)}
