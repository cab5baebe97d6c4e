"""Datasets that must not be mixed up: what belongs to one is refused with another, by every command that takes both."""

import dataclasses
import pathlib
import shutil

import pytest
from prepared_logs import LOG, prepared
from run_cases import CONFIG

from jrec import cli
from jrec.data.blocks import ShardReader
from jrec.data.schema import FORMAT, VERSION, DatasetError, Schema
from jrec.files import load_json, save_json
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

PLAN = ("--hardware", "dgx-a100", "--devices", "2", "--dim", "8", "--figure", "none")


def jrec(*arguments):
    return cli.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A dataset, one of equal table sizes that was made apart, and one of the same rows with other examples.

    And for the first two a run, a profile, a plan, a calibration and an FAE folder.
    """
    folder = tmp_path_factory.mktemp("identity")
    for seed, name in enumerate(("one", "other")):
        synthesize(shape_like("quickstart"), folder / name, SynthOptions(rows=900, seed=seed, block_size=64))
    schema = Schema.load(folder / "one")
    shutil.copytree(folder / "one", folder / "more")
    splits = {**schema.splits, "train": schema.splits["valid"], "valid": schema.splits["train"]}
    dataclasses.replace(schema, splits=splits).save(folder / "more")
    (folder / "tiny.toml").write_text(CONFIG)
    for name in ("one", "other"):
        data = folder / name
        assert jrec("access", data, "--out", f"{data}.access", "--quiet") == 0
        assert jrec("plan", data, *PLAN, "--out", f"{data}.plan") == 0
        assert (
            jrec("fae", "calibrate", data, "--budget", "30kB", "--small", "4kB", "--quiet", "--out", f"{data}.fae.json")
            == 0
        )
    assert train(folder, "run") == 0
    return folder


def train(folder, run, *overrides, data="one"):
    keys = [f"data.path={folder / data}", f"out={folder / run}", "max_steps=2", "evaluate.every_steps=0"]
    return jrec("train", folder / "tiny.toml", *keys, "evaluate.final_splits=[]", *overrides)


OTHER = {
    "eval": ("eval", "run", "other"),
    "eval with a plan": ("eval", "run", "one", "--devices", "2", "--plan", "other.plan"),
    "compress": ("compress", "run", "--rank", "2", "--largest", "1", "--out", "OUT", "--data", "other"),
    "plan from a profile": ("plan", "one", *PLAN, "--profile", "other.access", "--out", "OUT"),
    "plan that is explained": ("plan", "other", "--out", "one.plan", "--explain", "TABLE"),
    "replan": ("replan", "one.plan", "other.access", "--out", "OUT"),
    "replan before": ("replan", "one.plan", "one.access", "--before", "other.access", "--out", "OUT"),
    "pack": ("fae", "pack", "one", "--calibration", "other.fae.json", "--out", "OUT", "--quiet"),
}


@pytest.mark.parametrize("command", OTHER.values(), ids=OTHER)
def test_another_dataset_is_refused_and_both_are_named(world, tmp_path, capsys, command):
    table = Schema.load(world / "one").tables[0].name
    places = {"OUT": tmp_path / "out", "TABLE": table}
    known = {p.name: p for p in world.iterdir()}
    assert jrec(*(places.get(a, known.get(a, a)) for a in command)) == 2
    said = capsys.readouterr().err
    one, other = (Schema.load(world / name).identity for name in ("one", "other"))
    for dataset in (one, other):
        assert f"'quickstart' at {dataset.path} (rows {dataset.rows[:8]}, " in said
    assert f"not the same in both: table {table}" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", ["other", "more"])
def test_a_run_goes_on_with_its_own_examples_only(world, capsys, data):
    assert train(world, "run", "--resume", "max_steps=3", data=data) == 2
    said = capsys.readouterr().err
    assert f"the run in {world / 'run'} is of dataset 'quickstart' at {world / 'one'} (rows " in said
    assert f"not of 'quickstart' at {world / data} (rows " in said
    assert ("the examples are others" in said) == (data == "more")


def test_training_refuses_a_plan_of_another_dataset(world, capsys):
    assert train(world, "planned", "mesh.devices=2", f"plan={world / 'other.plan'}", "data.batch_size=64") == 2
    assert f"{world / 'other.plan'} is of dataset 'quickstart' at {world / 'other'} " in capsys.readouterr().err


def test_an_fae_run_goes_on_with_its_own_folder_only(world, tmp_path, capsys):
    for name in ("one", "other", "more"):
        shutil.copytree(world / name, tmp_path / name)
        calibration = ("--budget", "30kB", "--small", "4kB", "--quiet", "--out", tmp_path / f"{name}_fae")
        assert jrec("fae", "pack", tmp_path / name, *calibration) == 0
    (tmp_path / "tiny.toml").write_text(CONFIG)
    assert train(tmp_path, "run", "schedule=fae", "tables.tier=host", data="one_fae") == 0
    more = ("schedule=fae", "tables.tier=host", "--resume", "max_steps=3")
    for name in ("other", "more"):
        assert train(tmp_path, "run", *more, data=f"{name}_fae") == 2
        assert "is of dataset 'quickstart'" in capsys.readouterr().err
    (tmp_path / "one_fae").rename(tmp_path / "moved")
    assert train(tmp_path, "run", *more, data="moved") == 0


def test_a_copy_and_a_dataset_of_the_same_rows_are_taken(world, tmp_path, capsys):
    shutil.copytree(world / "one", tmp_path / "copy")
    for data in (tmp_path / "copy", world / "more"):
        assert jrec("eval", world / "run", data, "--batches", "1") == 0
        assert jrec("plan", data, *PLAN, "--profile", world / "one.access", "--out", tmp_path / "plan") == 0
    assert jrec("replan", tmp_path / "plan", world / "one.access") == 0
    assert (
        jrec(
            "plan",
            tmp_path / "copy",
            "--out",
            world / "one.plan",
            "--explain",
            Schema.load(world / "one").tables[0].name,
        )
        == 0
    )
    assert (
        jrec(
            "fae",
            "pack",
            tmp_path / "copy",
            "--calibration",
            world / "one.fae.json",
            "--out",
            tmp_path / "f",
            "--quiet",
        )
        == 0
    )
    shutil.copytree(world / "run", tmp_path / "run")
    (tmp_path / "tiny.toml").write_text(CONFIG)
    assert train(tmp_path, "run", "--resume", data="copy") == 0


def test_identity_is_of_content_not_of_place_or_way(tmp_path):
    one = prepared(tmp_path, LOG, "one").identity
    again = prepared(tmp_path, LOG, "again", shard_examples=1 << 21, key_seed=5).identity
    assert (again.rows, again.examples) == (one.rows, one.examples)
    renamed = prepared(tmp_path, LOG.replace("x", "w"), "renamed").identity
    assert renamed.rows != one.rows
    assert one.difference(renamed) == "not the same in both: table a"
    assert renamed.examples == one.examples  # the same numbers, which mean other values
    hashed = [prepared(tmp_path, LOG, f"hashed{seed}", max_rows=2, key_seed=seed).identity for seed in (0, 1)]
    assert len({one.rows, *(h.rows for h in hashed)}) == 3
    longer = prepared(tmp_path, LOG + LOG.partition("\n")[2], "longer").identity
    assert (longer.rows == one.rows, longer.examples == one.examples) == (True, False)


def test_a_dataset_of_an_older_version_is_refused_with_what_to_do(tmp_path):
    prepared(tmp_path, LOG, "one")
    path = tmp_path / "one" / "schema.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1', 1))
    with pytest.raises(
        DatasetError, match=r"version 1, but this jrec reads .* version 2; prepare the dataset again; by"
    ):
        Schema.load(tmp_path / "one")


def test_a_dataset_without_what_preparation_came_to_count_later_opens(tmp_path):
    """``oov_share`` came on 2026-11-27, in datasets, and in the schemas of exports, of the same version."""
    prepared(tmp_path, LOG, "one")
    path = tmp_path / "one" / "schema.json"
    now = Schema.load(tmp_path / "one")
    content = load_json(path, kind=FORMAT, version=VERSION, error=DatasetError, remedy="", sealed=True)
    content["tables"] = [{k: v for k, v in table.items() if k != "oov_share"} for table in content["tables"]]
    path.unlink()
    save_json(path, content, kind=FORMAT, version=VERSION, sealed=True)
    opened = Schema.load(tmp_path / "one")
    assert opened.tables == tuple(dataclasses.replace(table, oov_share=None) for table in now.tables)
    assert opened.identity == now.identity


# Shards


def shard_cases(folder: pathlib.Path):
    schema = Schema.load(folder)
    return schema, [(split, s) for split, part in schema.splits.items() for s in part.shards]


def test_every_swap_of_shards_is_noticed(tmp_path):
    """Also of shards of equal size: 300 examples of one-byte columns with as many blocks, of other values."""
    lines = [f"{i % 2},{chr(97 + i * 7 % 13)},{i * 11 % 17}\n" for i in range(400)]
    options = {"block_size": 10, "shard_examples": 40, "split": (0.8, 0.1, 0.1)}
    prepared(tmp_path, "label,a,b\n" + "".join(lines), "one", **options)
    schema, shards = shard_cases(tmp_path / "one")
    same_size = 0
    for i, (_, one) in enumerate(shards):
        for _, two in shards[i + 1 :]:
            same_size += one.bytes == two.bytes
            shutil.copytree(tmp_path / "one", tmp_path / "swapped", dirs_exist_ok=True)
            content = (tmp_path / "one" / one.file).read_bytes()
            (tmp_path / "swapped" / one.file).write_bytes((tmp_path / "one" / two.file).read_bytes())
            (tmp_path / "swapped" / two.file).write_bytes(content)
            for shard in (one, two):
                with pytest.raises(DatasetError, match=rf"{shard.file} (has [\d,]+ bytes|is not the shard)"):
                    ShardReader(tmp_path / "swapped", shard).read(0)
            shutil.copytree(tmp_path / "one", tmp_path / "swapped", dirs_exist_ok=True)
    assert same_size >= 10
    assert schema.identity == Schema.load(tmp_path / "swapped").identity
