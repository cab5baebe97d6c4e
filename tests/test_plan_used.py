"""A plan that is given is used or refused, and ``jrec plan`` writes none that a run would refuse."""

import dataclasses
import itertools

import pytest
from grids import some_of

from jrec import cli
from jrec.app.build import build_layout
from jrec.app.config import load_config
from jrec.app.run_plan import check_sharing, run_plan
from jrec.data.schema import Schema
from jrec.errors import ConfigError, JrecError
from jrec.row_optimizers import ROW_OPTIMIZERS
from jrec.sharding.errors import PlanError
from jrec.sharding.plan_file import load_plan

CONFIG = """
[data]
path = "{data}"
batch_size = 48
[model]
embedding_dim = 8
bottom_mlp = [8]
[optimizer.embedding]
name = "adagrad"
"""
HARDWARE = """
devices = 4
devices_per_node = 4
memory = "{memory}"
lookup = "1TB/s"
within = "100GB/s"
all_reduce = "20GB/s"
host = "25GB/s"
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "data"
    command = ["synth", "--like", "criteo-kaggle", "--table-rows", "60", "--rows", "600", "--out", str(folder)]
    assert cli.main([*command, "--quiet"]) == 0
    return folder


@pytest.fixture
def planned(data, tmp_path):
    """Runs ``jrec plan``; gives the file, and the configuration as training has it."""
    (tmp_path / "run.toml").write_text(CONFIG.format(data=data))

    def plan(*options, memory="1GB", configured=True, overrides=()):
        hardware = tmp_path / f"{memory}.toml"
        hardware.write_text(HARDWARE.format(memory=memory))
        lines = [*CONFIG.format(data=data).splitlines(), *overrides]
        (tmp_path / "run.toml").write_text("\n".join(lines))
        out = tmp_path / "plan"
        out.unlink(missing_ok=True)
        source = ["--config", str(tmp_path / "run.toml")] if configured else ["--dim", "8", "--slot-bytes", "32"]
        made = [
            "plan",
            str(data),
            "--hardware",
            str(hardware),
            *source,
            "--figure",
            "none",
            "--out",
            str(out),
            *options,
        ]
        return cli.main(made), out

    return plan


def opened(data, config_file, plan_file, *overrides):
    """As a run opens its plan."""
    plan = load_plan(plan_file)
    given = [f"data.path={str(data)!r}", f"plan={str(plan_file)!r}", f"mesh.devices={plan.devices}", *overrides]
    config, schema = load_config(config_file, given), Schema.load(data)
    layout = build_layout(config, schema, plan)
    training = plan.purpose == "training"
    slots = ROW_OPTIMIZERS[config.optimizer.embedding.name].slots if training else None
    found = run_plan(plan, config, schema, layout, slots)
    check_sharing(config, found, [0] * plan.devices, training=training)
    return found


GRID = list(
    itertools.product(
        ((), ("--tables-on", "3"), ("--tables-on", "0,2"), ("--tables-on", "1-3")),
        ("1GB", "30kB", "7kB"),
        ((), ("--tt", "C3=2"), ("--tt", "C3=2:20!")),
    )
)


@pytest.mark.parametrize(("apart", "memory", "cores"), some_of(GRID, *GRID[::4]))
def test_every_plan_that_is_written_opens_as_training_opens_it(planned, data, tmp_path, capsys, apart, memory, cores):
    for configured in (True, False):
        code, out = planned(*apart, *cores, memory=memory, configured=configured)
        said = capsys.readouterr().err
        assert code in (0, 2), said
        assert out.exists() == (code == 0)
        assert len(said.splitlines()) == (code != 0), said
        if code == 0:
            found = opened(data, tmp_path / "run.toml", out)
            assert (found.computes is not None) == bool(apart)
            assert not (apart and found.rows_in("host"))


@pytest.mark.parametrize(
    ("options", "overrides", "says"),
    [
        (("--tables-on", "0-2", "--batch-size", "47"), (), None),
        (("--tables-on", "0", "--batch-size", "47"), (), "47, which the 3 devices that compute cannot share equally"),
        (
            (
                "--devices",
                "3",
            ),
            ("[mesh]", "devices = 3"),
            None,
        ),
        (("--batch-size", "50"), (), "50, which 4 devices cannot share equally"),
        (("--dim", "16"), (), "--dim is 16, but"),
        (("--dtype", "bfloat16"), (), "--dtype is bfloat16, but"),
        (("--tt", "C3=2"), ("[tables.overrides.C3]", 'tier = "sharded"'), "tables.overrides.C3.tier = 'sharded'"),
        ((), ("[tables]", 'tier = "host"'), "nothing of it would be used"),
        (("--tables-on", "0"), ("[tables.overrides.C3]", 'tier = "host"'), None),
        ((), ("[tables.overrides.C3]", 'tier = "host"'), None),
    ],
)
def test_what_a_run_would_refuse_is_not_written(planned, capsys, options, overrides, says):
    code, out = planned(*options, overrides=overrides)
    said = capsys.readouterr().err
    assert (code, out.exists()) == ((0, True) if says is None else (2, False)), said
    assert says is None or says in said
    assert not out.with_name("plan.partial").exists()


def test_a_plan_of_which_nothing_would_be_used_is_refused(planned, data, tmp_path):
    code, out = planned()
    assert code == 0
    opened(data, tmp_path / "run.toml", out, "tables.overrides.C3.tier=host")  # of the other tables it is used
    with pytest.raises(ConfigError, match="nothing of it would be used"):
        opened(data, tmp_path / "run.toml", out, "tables.tier=host")
    with pytest.raises(ConfigError, match="nothing of it would be used"):
        opened(data, tmp_path / "run.toml", out, "tables.tier=replicated")
    with pytest.raises(ConfigError, match=r"52, which 4 devices \(mesh.devices\), in data.micro_batches = 2 .* of 8"):
        opened(data, tmp_path / "run.toml", out, "data.batch_size=52", "data.micro_batches=2")
    with pytest.raises(PlanError, match="is for 4 devices, but the mesh has 2"):
        opened(data, tmp_path / "run.toml", out, "tables.tier=host", "mesh.devices=2")
    planned("--for", "inference")
    config = load_config(tmp_path / "run.toml", [f"plan={str(out)!r}", "mesh.devices=4", "tables.tier=host"])
    schema, plan = Schema.load(data), load_plan(out)
    with pytest.raises(ConfigError, match="is for inference"):
        run_plan(plan, config, schema, build_layout(config, schema, plan), ROW_OPTIMIZERS["adagrad"].slots)


def test_a_plan_of_cores_alone_is_used(planned, data, tmp_path):
    tables = [t.name for t in Schema.load(data).tables if t.rows >= 16]
    lines = ("[tables]", 'tier = "host"', *(f'[tables.overrides.{name}]\ntier = "tt"\nrank = 2' for name in tables))
    code, out = planned(overrides=lines)
    assert code == 0
    plan = opened(data, tmp_path / "run.toml", out)
    assert plan.tables
    assert plan.rows_in("host") == sum(t.rows for t in plan.tables)
    with pytest.raises(JrecError, match="mesh has 2"):
        opened(data, tmp_path / "run.toml", out, "mesh.devices=2")


@pytest.mark.parametrize("tier", ["host", "replicated"])
def test_without_a_plan_tables_are_where_their_tier_says_on_a_mesh(data, tmp_path, planned, tier):
    config = load_config(tmp_path / "run.toml", [f"tables.tier={tier}", "mesh.devices=4"])
    schema = Schema.load(data)
    found = run_plan(None, config, schema, build_layout(config, schema), {})
    assert found.rows_in(tier) == sum(t.rows for t in found.tables) > 0
    assert found.devices == 4
    assert dataclasses.asdict(config.mesh)["devices"] == 4
