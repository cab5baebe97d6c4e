"""``jrec export``: a trained model for serving, without the run: a program, plain rows, vocabularies; or a delta."""

from __future__ import annotations

import argparse
import pathlib
import sys

from jrec.app.commands.arguments import add_quiet, progress_of

DESCRIPTION = """\
Export a trained model for serving.

CHECKPOINT is a run folder (its best checkpoint where it keeps one, else the latest), a folder of checkpoints that
Run.save wrote, or one checkpoint in either. DIR gets the dense part as StableHLO (jax.export, any batch size,
CPUs and CUDA GPUs), every table as a NumPy file that is mapped into memory, and what turns raw values into rows.
`jrec.serving.load(DIR)` scores raw columns with it; docs/serving.md serves it without jrec, in NumPy and JAX. With
--since only the rows that changed are written, as a delta, which `Model.apply` takes."""
EPILOG = """examples:
  jrec export runs/kaggle --out exports/kaggle
  jrec export runs/kaggle --dtype int8 --out exports/kaggle_int8
  jrec export runs/kaggle --since exports/kaggle_int8 --out exports/kaggle_tuesday
  jrec export runs/kaggle --since exports/kaggle_int8 exports/kaggle_tuesday --out exports/kaggle_wednesday
  jrec export runs/kaggle --onnx --out exports/kaggle_onnx
"""
DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one checkpoint")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="of rows (default: as they were trained); int8 and int4 keep a scale and a bias with each row",
    )  # fmt: skip
    parser.add_argument(
        "--since", nargs="+", default=(), metavar="DIR",
        help="an export, and the deltas after it in order: write only what changed since then",
    )  # fmt: skip
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too, for onnxruntime (jrec[onnx])")
    parser.add_argument("--data", metavar="DATA", help="the dataset, if it is no longer where the run says")
    parser.add_argument("--overwrite", action="store_true", help="replace the export in that folder, if any")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Exports; returns 0."""
    from jrec.app.export import export_run
    from jrec.shown import human_bytes

    manifest = export_run(
        args.checkpoint,
        args.out,
        data=args.data,
        dtype=args.dtype,
        since=args.since,
        onnx=args.onnx,
        overwrite=args.overwrite,
        progress=progress_of(args),
        report=lambda message: print(f"jrec: {message}", file=sys.stderr),
    )
    out = pathlib.Path(args.out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    rows = sum(part.rows for parts in manifest.tables.values() for part in parts)
    subject = "export" if not manifest.follows else f"delta of {manifest.parent[:12]}"
    print(
        f"{out}: {subject} {manifest.id[:12]} of run {manifest.run}, step {manifest.step:,}: {len(manifest.tables)}"
        f" tables, {rows:,} rows of {manifest.dtype}, {human_bytes(size)}"
    )
    return 0
