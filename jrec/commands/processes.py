"""What a command's processes are told of each other, where several run it together."""

from __future__ import annotations

import argparse

from jrec.commands.arguments import DEVICES, integer


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments by which processes find each other."""
    many = parser.add_argument_group("several processes", "see docs/distributed.md")
    many.add_argument("--distributed", action="store_true", help="be one of the processes that the cluster started")
    many.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, without a cluster")
    many.add_argument("--processes", type=DEVICES, metavar="N", help="how many there are")
    many.add_argument("--process", type=integer(0, 2**16 - 1), metavar="I", help="which one this is, from 0")


def join_if_many(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are any; call it before anything else of JAX."""
    if args.distributed or args.coordinator:
        from jrec.train.mesh_processes import join_processes

        join_processes(args.coordinator, args.processes, args.process)
