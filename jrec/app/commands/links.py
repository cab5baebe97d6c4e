"""``jrec links``: what fetching rows costs between this machine's devices."""

from __future__ import annotations

import argparse

from jrec.app.commands.arguments import DEVICES, add_quiet, integer, progress_of, size

DESCRIPTION = """\
Measure, for every pair of visible devices, how long one takes to read a byte of the other's rows, and the bandwidth of
an all-reduce over all of them. `jrec plan --hardware` takes the file that is written."""
EPILOG = """examples:
  jrec links --out node.toml
  jrec plan data/kaggle --hardware node.toml --out plan
  jrec links --row-bytes 256 --message 16MB --out node.toml
  XLA_FLAGS=--xla_force_host_platform_device_count=4 jrec links --out four.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--out", metavar="FILE.toml", help="write the hardware file there (default: print it)")
    parser.add_argument("--name", help="the hardware's name (default: the devices' kind and number)")
    parser.add_argument("--devices", type=DEVICES, metavar="N", help="measure only the first N")
    parser.add_argument(
        "--memory",
        type=size(0),
        metavar="BYTES",
        help="memory of each device for tables, such as 110GB (default: 80 %%)",
    )
    parser.add_argument(
        "--row-bytes", type=integer(4, 2**30), default=64, metavar="N", help="bytes of a row (default 64: 16 float32)"
    )
    parser.add_argument(
        "--message", type=size(1), default="4MB", metavar="BYTES", help="bytes that travel at once (default 4MB)"
    )
    parser.add_argument(
        "--repeats", type=integer(1, 10**6), default=7, metavar="N", help="timings of each pair (default 7)"
    )
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, writes and summarizes."""
    import itertools

    import jax

    from jrec import environment
    from jrec.errors import ConfigError
    from jrec.outputs import check_file, check_output, write_file
    from jrec.sharding.links import hardware_toml, measure_hardware

    if args.out and not args.out.endswith(".toml"):
        raise ConfigError(f"--out is {args.out}; hardware files end in .toml")
    if args.out:
        check_output(args.out)
        check_file(args.out, overwrite=True)
    devices = jax.devices()
    if args.devices is not None:
        if not 1 <= args.devices <= len(devices):
            raise ConfigError(
                f"--devices is {args.devices}, but JAX sees {len(devices)} {devices[0].platform} device(s)"
            )
        devices = devices[: args.devices]
    memory = None if args.memory is None else args.memory
    count = itertools.count()
    with progress_of(args).stage("measuring links", len(devices) ** 2 + 1) as done:
        hardware = measure_hardware(
            args.name or f"{len(devices)} x {devices[0].device_kind}",
            devices,
            memory=memory,
            row_bytes=args.row_bytes,
            message=args.message,
            repeats=args.repeats,
            tick=lambda measured: done(next(count)),
        )
    text = hardware_toml(hardware, f"measured by `jrec links`: {environment.summary()}")
    if not args.out:
        print(text, end="")
        return 0
    write_file(args.out, text)
    print(f"{args.out}: {summary(hardware)}")
    return 0


def summary(hardware) -> str:
    """One line: local and remote bandwidth, and the all-reduce's."""
    import numpy as np

    local = 1e-9 / np.diag(hardware.L)
    phrases = [f"local lookups {local.min():.3g} to {local.max():.3g} GB/s"]
    if hardware.devices > 1:
        remote = 1e-9 / hardware.L[hardware.remote]
        phrases.append(f"between devices {remote.min():.3g} to {remote.max():.3g} GB/s")
    return ", ".join([*phrases, f"all-reduce {1e-9 * hardware.all_reduce:.3g} GB/s"])
