"""``jrec fae``: hot rows, and a dataset split into hot and cold examples."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import DIM, SEED, SLOT_BYTES, THREADS, add_quiet, number, progress_of, size
from jrec.app.commands.rows import Rows, rows_of

if TYPE_CHECKING:
    from jrec.access.calibrate import CalibrateOptions, Calibration

DESCRIPTION = """\
Prepare a dataset for training with hot rows on the device and cold ones in host memory (FAE).

`calibrate` finds the rows that are accessed often enough to be kept on the device, within a budget, by the counts that
`jrec prepare` left in the dataset. `pack` splits the training examples into those that
read only hot rows and all others. `check` reads a whole packed folder and compares all checksums. docs/fae.md
describes it all."""
EPILOG = """examples:
  jrec fae calibrate data/kaggle --budget 256MB --out kaggle.fae
  jrec fae pack data/kaggle --calibration kaggle.fae --out data/kaggle_fae
  jrec fae pack data/kaggle --budget 1GB --config configs/criteo_kaggle.toml --out data/kaggle_fae
  jrec fae check data/kaggle_fae
  jrec train configs/criteo_kaggle.toml data.path=data/kaggle_fae schedule=fae
"""
CALIBRATE_EPILOG = """examples:
  jrec fae calibrate data/kaggle --budget 256MB
  jrec fae calibrate data/terabyte --budget 2GB --dim 64 --slot-bytes 0 --out terabyte.fae
  jrec fae calibrate data/kaggle --config configs/criteo_kaggle.toml
  jrec fae calibrate data/kaggle --sample 0.05    # a sample of the inputs and bounds, as in the paper
"""
PACK_EPILOG = """examples:
  jrec fae pack data/kaggle --calibration kaggle.fae --out data/kaggle_fae
  jrec fae pack data/kaggle --budget 256MB --out data/kaggle_fae --shuffle-seed 1

A pack that was interrupted goes on where it was when the same command is given again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, about: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return actions.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    one = action("calibrate", "find the hot rows that fit a budget", CALIBRATE_EPILOG)
    one.add_argument("data", metavar="DATA", help="a dataset folder")
    one.add_argument("--out", metavar="FILE", help="write the calibration there")
    _add_calibration(one)
    two = action("pack", "split the training examples into hot and cold ones", PACK_EPILOG)
    two.add_argument("data", metavar="DATA", help="a dataset folder")
    two.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    two.add_argument(
        "--calibration", metavar="FILE", help="a calibration by `jrec fae calibrate`; without it, one is made now"
    )
    two.add_argument(
        "--shuffle-seed", type=SEED, metavar="N",
        help="shuffle the examples, some hundred thousand at a time (default: they keep the order of time)",
    )  # fmt: skip
    two.add_argument(
        "--threads", type=THREADS, metavar="N", help="threads (default: the cores, at most 8); they change no result"
    )
    two.add_argument("--overwrite", action="store_true", help="replace a finished FAE folder at DIR")
    _add_calibration(two)
    three = action("check", "read a packed folder whole and compare all checksums")
    three.add_argument("folder", metavar="DIR", help="made by `jrec fae pack`")
    add_quiet(three)


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--budget", type=size(0), metavar="SIZE", help="bytes of hot rows with slots on a device (default 256MB)"
    )
    group.add_argument(
        "--sample",
        type=number(0, 1, above=True),
        metavar="X",
        help="decide by a sample of this share of the blocks and the Rand-Em Box's bounds, as the paper does (default:"
        " count exactly, by the counts that the dataset has)",
    )
    group.add_argument("--small", type=size(0), metavar="SIZE", help="all rows of smaller tables are hot (default 1MB)")
    group.add_argument("--config", metavar="CONFIG", help="take dim, dtype and slots from this configuration")
    group.add_argument("--dim", type=DIM, metavar="N", help="elements of a row (default 16)")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of a row (default float32)")
    group.add_argument(
        "--slot-bytes",
        type=SLOT_BYTES,
        metavar="N",
        help="bytes of a row's optimizer slots (default 4: row-wise Adagrad's)",
    )
    add_quiet(parser)


_CALIBRATION = ("budget", "sample", "small", "config", "dim", "dtype", "slot_bytes")


def run(args: argparse.Namespace) -> int:
    """Calibrates, packs or checks; returns 0."""
    return {"calibrate": _calibrate, "pack": _pack, "check": _check}[args.action](args)


def _calibrate(args: argparse.Namespace) -> int:
    from jrec.access.calibrate import calibrate
    from jrec.outputs import check_output

    if args.out:
        check_output(args.out, inputs=[args.data, args.config or ""])
    calibration = calibrate(args.data, _options(args), progress=progress_of(args))
    print("\n".join(_lines(calibration)))
    if args.out:
        calibration.save(args.out)
        print(f"{args.out}: the calibration")
    return 0


def _pack(args: argparse.Namespace) -> int:
    from jrec.access.calibrate import Calibration, calibrate
    from jrec.data.schema import Schema
    from jrec.errors import ConfigError
    from jrec.prepare.fae_pack import PackOptions, pack

    schema, progress = Schema.load(args.data), progress_of(args)
    if args.calibration:
        if odd := [name for name in _CALIBRATION if getattr(args, name) is not None]:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in odd)
            raise ConfigError(f"--calibration {args.calibration} is given; {options} would make another one")
        calibration = Calibration.load(args.calibration)
    else:
        calibration = calibrate(args.data, _options(args), schema=schema, progress=progress)
        print("\n".join(_lines(calibration)))
    calibration.check_dataset(schema)
    threads = {} if args.threads is None else {"threads": args.threads}
    packed = pack(
        args.data,
        args.out,
        calibration.hot_set(),
        PackOptions(seed=args.shuffle_seed, overwrite=args.overwrite, **threads),
        command=shlex.join(["jrec", *sys.argv[1:]]),
        progress=progress,
        report=lambda message: print(message, file=sys.stderr),
    )
    total = packed.hot_examples + packed.cold_examples
    print(
        f"{args.out}: {packed.hot_examples:,} hot examples ({100 * packed.hot_examples / total:.1f} %) and"
        f" {packed.cold_examples:,} cold ones, each of the source's once (content {packed.content})"
    )
    return 0


def _lines(calibration: Calibration) -> list[str]:
    """Which rows are hot, the large tables by name, and what to expect of them."""
    from jrec.shown import human_bytes

    tables, budget = calibration.tables, calibration.options["budget"]
    rows, hot, small = sum(t.rows for t in tables), sum(t.hot for t in tables), sum(not t.large for t in tables)
    inputs, threshold = calibration.hot_inputs, calibration.threshold
    error = "not known from one block" if inputs.error is None else f"{100 * inputs.error:.1f} %"
    return [
        f"{calibration.name}: {hot:,} of {rows:,} rows are hot, {human_bytes(calibration.hot_bytes)} of"
        f" {human_bytes(rows * calibration.row_bytes)}, {calibration.row_bytes} bytes a row with its optimizer's"
        f" slots; the budget is {human_bytes(budget)}",
        *(f"  {t.name}: {t.hot:,} of {t.rows:,} rows ({100 * t.hot / t.rows:.2f} %)" for t in tables if t.large),
        *([f"  {small} small table(s): all rows"] if small else []),
        *(["a bound of the Rand-Em Box did not hold: give less (--budget), or count exactly"]
          if calibration.hot_bytes > budget else []),
        f"counted: {calibration.source}",
        "threshold: "
        + ("none, the budget has no room for a row of a large table" if threshold is None else
           f"{threshold:.3g} of the inputs, {calibration.cutoff:,.3g} accesses as counted"),
        f"hot inputs: {100 * inputs.share:.1f} % expected (standard error {error}, on {inputs.inputs:,} inputs)",
    ]  # fmt: skip


def _check(args: argparse.Namespace) -> int:
    from jrec.prepare.fae_pack import verify

    manifest = verify(args.folder, progress=progress_of(args))
    print(
        f"{args.folder}: whole; {manifest.hot_examples:,} hot and {manifest.cold_examples:,} cold examples of"
        f" {manifest.name}, {sum(t.hot for t in manifest.tables):,} hot rows"
    )
    return 0


def _options(args: argparse.Namespace) -> CalibrateOptions:
    from jrec.access.calibrate import CalibrateOptions, SampleOptions
    from jrec.sharding.problem import ITEM_BYTES

    rows = Rows(dim=16, slot_bytes=4)
    if args.config:
        from jrec.app.config import load_config

        rows = rows_of(load_config(args.config, (f"data.path={args.data}",)))
    rows = rows.given(args)
    options = {"budget": args.budget, "small_bytes": args.small}
    return CalibrateOptions(
        **{key: value for key, value in options.items() if value is not None},
        sample=None if args.sample is None else SampleOptions(rate=args.sample),
        row_bytes=rows.dim * ITEM_BYTES[rows.dtype] + rows.slot_bytes,
    )
