"""``jrec plan``: which device keeps which rows."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import COUNT, DEVICES, DIM, SLOT_BYTES, number, size
from jrec.app.commands.plan_checks import check_shared, check_trains, save_usable
from jrec.app.commands.rows import Rows, check_row_arguments, rows_of

if TYPE_CHECKING:
    from jrec.access.profile import AccessProfile
    from jrec.app.config import TrainConfig
    from jrec.data.schema import Schema
    from jrec.sharding.cost import Cost
    from jrec.sharding.planner import PlanOptions
    from jrec.sharding.problem import Problem
    from jrec.sharding.tiers import TTOption

DESCRIPTION = """\
Decide where every row of every table lives: on one device, on all, in host memory or as tensor-train cores (OPER).

Prints how evenly memory, lookups and communication fall on the devices, beside the strategies of other systems, what
was chosen where memory is short, and what more memory would gain. Draws the comparison as OPER's Figure 10. With
--explain and an existing plan it says where a table or a row lives instead. docs/placement.md describes it all."""
EPILOG = """examples:
  jrec plan data/kaggle --hardware dgx-a100 --config configs/criteo_kaggle.toml --out plan
  jrec plan data/kaggle --hardware h200x8 --devices 4 --dim 16 --batch-size 65536 --out plan
  jrec plan data/kaggle --hardware cluster.toml --dim 16 --memory 300MB --tt C3=32 --tt C12=32 --out plan
  jrec plan data/kaggle --hardware a100-4x4 --dim 16 --for inference --extra-memory 0.1 --out serving_plan
  jrec plan data/kaggle --hardware h200x8 --dim 16 --profile sampled.access --out plan
  jrec plan data/kaggle --hardware h200x8 --dim 16 --tables-on 4-7 --out apart
  jrec plan --out plan --explain C3
  jrec plan data/kaggle --out plan --explain C3:1000

hardware: dgx-a100, h200x8, a100-4x4, h200-2x8, or a TOML file such as
  devices = 8
  devices_per_node = 4
  memory = "30GB"        # or a list, one a device
  lookup = "1.5TB/s"     # of rows of a device's own memory
  within = "300GB/s"     # from device to device in a node
  between = "25GB/s"     # between nodes
  all_reduce = "20GB/s"
  host = "25GB/s"        # to host memory; leave out for no host tier
  tables_on = "4-7"      # as --tables-on; leave out for tables on all
"""
PER_DEVICE = 16_384  # examples, OPER's setting: Table 2's 3.25 MB are 16,384 x 26 x 64 bytes / 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("data", metavar="DATA", nargs="?", help="a dataset folder")
    parser.add_argument("--hardware", metavar="H", help="a preset or a TOML file, see below")
    parser.add_argument("--devices", type=DEVICES, metavar="N", help="use only the first N devices")
    parser.add_argument(
        "--memory",
        type=size(0),
        metavar="SIZE",
        help="memory for tables on each device, such as 30GB (default: as H says)",
    )
    parser.add_argument(
        "--tables-on", metavar="DEVICES",
        help="these devices, such as 4-7 or 0,2, keep the tables and run no dense model; the others compute"
        " (default: of H, or all devices do both)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", default="plan", help="the plan file (default plan)")
    parser.add_argument("--for", dest="purpose", choices=("training", "inference"), default="training")
    parser.add_argument(
        "--profile", metavar="FILE", help="an access profile by `jrec access` (default: the training counts)"
    )
    model = parser.add_argument_group("tables")
    model.add_argument(
        "--config", metavar="CONFIG", help="take dim, dtype, batch size, slots and tables from this configuration"
    )
    model.add_argument("--dim", type=DIM, metavar="N", help="elements of a row")
    model.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of a row (default float32)")
    model.add_argument(
        "--slot-bytes", type=SLOT_BYTES, metavar="N", help="bytes of a row's optimizer slots (default 0)"
    )
    model.add_argument(
        "--batch-size", type=COUNT, metavar="N",
        help=f"examples of a step over all devices (default {PER_DEVICE:,} a device that computes)",
    )  # fmt: skip
    search = parser.add_argument_group("search")
    search.add_argument(
        "--extra-memory",
        type=number(0, 1000),
        default=0.05,
        metavar="X",
        help="memory for copies, as a share of the tables' size (default 0.05)",
    )
    search.add_argument(
        "--threshold",
        type=number(0, 1, above=True),
        default=0.001,
        metavar="X",
        help="threshold of partitions (default 0.001)",
    )
    search.add_argument(
        "--target",
        type=number(0, 1, above=True),
        default=0.995,
        metavar="X",
        help="degree of balance to reach (default 0.995)",
    )
    search.add_argument(
        "--rule",
        choices=("cheapest", "oper", "per-device"),
        default="cheapest",
        help="rule of replication in training: the paper's, one that counts what devices serve at once, or the one of"
        " them whose step costs less (default)",
    )
    search.add_argument(
        "--dedup", action="store_true", help="a device fetches a row once a step, however often it is used"
    )
    search.add_argument("--no-host", action="store_true", help="keep all rows on the devices, or fail")
    search.add_argument(
        "--tt", action="append", default=[], metavar="TABLE=RANK[:FROM]",
        help="where memory is short, TABLE may be a tensor train of RANK, from row FROM on; with '!' at the end, always"
        " (as tables are that --config makes tensor-train)",
    )  # fmt: skip
    parser.add_argument(
        "--figure", metavar="FILE.svg", help="figure of the comparison (default OUT.svg); 'none' draws none"
    )
    parser.add_argument(
        "--explain", metavar="TABLE[:ROW]", help="say where TABLE or its row ROW lives, in the plan of --out"
    )


def run(args: argparse.Namespace) -> int:
    """Plans or explains."""
    from jrec.errors import ConfigError

    if args.explain and not args.hardware:
        return _explain(args)
    if args.data is None or args.hardware is None:
        raise ConfigError("give DATA and --hardware to make a plan, or --out PLAN --explain TABLE to read one")

    from jrec.data.schema import Schema
    from jrec.outputs import check_output
    from jrec.sharding.baselines import BASELINES
    from jrec.sharding.cost import evaluate
    from jrec.sharding.drift import describe
    from jrec.sharding.explain import balance_table, explain, summary
    from jrec.sharding.figure import check_ending, draw_balance
    from jrec.sharding.memory_centric import placed_by
    from jrec.sharding.plan_file import check_budget
    from jrec.sharding.planner import plan_placement
    from jrec.sharding.plans import build_plan

    figure = "" if args.figure == "none" else args.figure or f"{args.out}.svg"
    for out in filter(None, (args.out, figure)):
        check_output(out, inputs=[args.data, args.profile or "", args.config or "", args.hardware])
    if figure:
        check_ending(figure)
    schema, config = _settled(Schema.load(args.data, check_files=False), _config(args))
    problem = _problem(args, schema, config)
    check_shared(problem, _batch_size(args, config))
    options = _options(args, problem, schema, config)
    planned = plan_placement(problem, options)
    plan = build_plan(problem, planned.placement, describe(problem, options, planned, data=schema.name))
    check_budget(plan, problem.hardware.memory)
    explained = explain(plan, args.explain, problem) if args.explain else ""  # refused before a file is written
    save_usable(plan, args.out, schema=schema, config=config)
    costs = {"oper": planned.cost}
    if problem.computes is not None:
        hardware = dataclasses.replace(problem.hardware, tables_on=())
        costs |= _also("tables on all", dataclasses.replace(problem, hardware=hardware), options)
    elif problem.purpose == "training" and problem.devices > 1:
        other = "oper" if planned.rule == "per-device" else "per-device"
        costs |= _also(f"with --rule {other}", problem, dataclasses.replace(options, rule=other))
    costs |= {name: evaluate(problem, placed_by(problem, place)) for name, place in BASELINES.items()}
    print(balance_table(costs))
    print(summary(problem, planned, plan))
    size = pathlib.Path(args.out).stat().st_size
    print(f"{args.out}: {len(plan.start):,} ranges of {len(plan.tables)} tables, {size:,} bytes")
    if figure:
        title = f"{schema.title} on {problem.hardware.name}, {problem.purpose}"
        draw_balance(costs, figure, title=title)
        print(f"{figure}: OPER's Figure 10")
    if explained:
        print(explained)
    return 0


def _also(name: str, problem: Problem, options: PlanOptions) -> dict[str, Cost]:
    """What a plan of another kind costs, by its name, where the tables then fit."""
    from jrec.sharding.errors import PlanError
    from jrec.sharding.planner import plan_placement

    try:
        return {name: plan_placement(problem, options).cost}
    except PlanError:
        return {}


def _explain(args: argparse.Namespace) -> int:
    from jrec.data.schema import Schema
    from jrec.sharding.drift import problem_of_plan
    from jrec.sharding.explain import explain
    from jrec.sharding.plan_file import load_plan

    problem = schema = None
    if args.data is not None:
        schema = Schema.load(args.data, check_files=False)
    plan = load_plan(args.out, schema=schema)
    if schema is not None:
        schema = schema.with_capacities({table.name: table.rows for table in plan.tables})
        problem = problem_of_plan(plan, _profile(args, schema))
    print(explain(plan, args.explain, problem))
    return 0


def _profile(args: argparse.Namespace, schema: Schema) -> AccessProfile:
    from jrec.access.count import exact_profile
    from jrec.access.profile import AccessProfile
    from jrec.progress import Progress

    if args.profile is None:
        return exact_profile(args.data, schema, progress=Progress())
    profile = AccessProfile.load(args.profile)
    profile.check_dataset(schema)
    return profile


def _settled(schema: Schema, config: TrainConfig | None) -> tuple[Schema, TrainConfig | None]:
    """Schema and configuration with the rows that the run, or one without a configuration, gives to growing tables."""
    if not schema.growing:
        return schema, config
    if config is None:
        return schema.with_capacities({t.name: t.rows_for_all for t in schema.tables}), None
    from jrec.app.dataset import with_capacities
    from jrec.app.tables import growths_of

    config = with_capacities(config, schema)
    growths = growths_of(config, schema)
    return schema.with_capacities({name: growth.capacity for name, growth in growths.items()}), config


def _problem(args: argparse.Namespace, schema: Schema, config: TrainConfig | None) -> Problem:
    from jrec.sharding.hardware import load_hardware, parse_devices
    from jrec.sharding.problem import Problem, tables_of

    hardware = load_hardware(args.hardware, devices=args.devices)
    if args.memory is not None:
        hardware = hardware.with_memory(args.memory)
    if args.tables_on:
        hardware = dataclasses.replace(hardware, tables_on=parse_devices(args.tables_on, "--tables-on"))
    rows = _rows(args, config)
    tables = tables_of(
        [(t.name, t.rows) for t in schema.tables], rows.dim, dtype=rows.dtype, slot_bytes=rows.slot_bytes
    )
    if config is not None and args.slot_bytes is None and args.purpose == "training":
        tables = tuple(dataclasses.replace(t, slot_bytes=rows_of(config, t.name).slot_bytes) for t in tables)
    return Problem(
        tables=tables,
        profile=_profile(args, schema),
        hardware=hardware,
        batch_size=_batch_size(args, config) or PER_DEVICE * (hardware.devices - len(hardware.tables_on)),
        purpose=args.purpose,
        extra_memory=args.extra_memory,
        dedup=args.dedup,
    )


def _rows(args: argparse.Namespace, config: TrainConfig | None) -> Rows:
    """What a row is, by the arguments or else the configuration."""
    from jrec.errors import ConfigError

    if config is None:
        if args.dim is None:
            raise ConfigError("say how long rows are: --dim N, or --config CONFIG.toml of the run to be planned")
        return Rows(dim=args.dim).given(args)
    rows = rows_of(config)
    check_row_arguments(args.config, rows, args)
    return (rows if args.purpose == "training" else dataclasses.replace(rows, slot_bytes=0)).given(args)


def _batch_size(args: argparse.Namespace, config: TrainConfig | None) -> int | None:
    """Examples of a step, by the arguments or else the configuration; None where neither says."""
    return args.batch_size or (None if config is None else config.data.batch_size)


def _config(args: argparse.Namespace) -> TrainConfig | None:
    """The run's configuration that the arguments name, if any."""
    if not args.config:
        return None
    from jrec.app.config import load_config

    config = load_config(args.config, () if args.data is None else (f"data.path={args.data}",))
    config.model.of_kind.check_plan(f"--config {args.config}")
    return config


def _options(args: argparse.Namespace, problem: Problem, schema: Schema, config: TrainConfig | None) -> PlanOptions:
    from jrec.errors import ConfigError
    from jrec.sharding.planner import PlanOptions

    allowed, fixed = [_tt(text, problem) for text in args.tt], _configured(config, problem, schema)
    names = [option.table for option in allowed]
    check_trains(args.config, config, names)
    if growing := sorted(schema.growing & {*names}):
        raise ConfigError(
            f"--tt {growing[0]}: the table grows, so that its rows change hands, which cores cannot; leave it out, or"
            " prepare the dataset without --growing"
        )
    if twice := sorted({o.table for o in allowed} & {o.table for o in fixed}):
        raise ConfigError(
            f"--tt {twice[0]}: {args.config} makes that table tensor-train already; say in tables.overrides.{twice[0]}"
            " what is to be different"
        )
    return PlanOptions(
        threshold=args.threshold,
        target=args.target,
        rule=args.rule,
        host=not args.no_host and problem.computes is None,  # devices that only keep tables share no host rows
        tt=(*allowed, *fixed),
    )


def _configured(config: TrainConfig | None, problem: Problem, schema: Schema) -> list[TTOption]:
    """The tables that the run's configuration makes tensor-train, as it makes them."""
    if config is None:
        return []
    from jrec.app.tables import plan_tables
    from jrec.sharding.tiers import tt_option

    return [
        tt_option(problem, t.name, max(t.tt_shape.ranks), first_rank=t.first_row, required=True, shape=t.tt_shape)
        for t in plan_tables(dataclasses.replace(config, plan=""), schema).tables
        if t.tt_shape is not None
    ]


def _tt(text: str, problem: Problem) -> TTOption:
    """``TABLE=RANK``, ``TABLE=RANK:FROM``, ``TABLE=RANK!``."""
    from jrec.errors import ConfigError
    from jrec.sharding.tiers import tt_option

    name, _, value = text.removesuffix("!").rpartition("=")
    rank, _, first = value.partition(":")
    numbers = (rank, first or "0")
    if not name or not all(n.isascii() and n.isdigit() and len(n) <= 10 for n in numbers):
        raise ConfigError(f"--tt {text!r} is not TABLE=RANK or TABLE=RANK:FROM, such as C3=32")
    return tt_option(problem, name, int(rank), first_rank=int(first or 0), required=text.endswith("!"))
