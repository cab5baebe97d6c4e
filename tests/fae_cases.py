"""Datasets to pack for FAE, their hot rows, and what an FAE run leaves."""

import dataclasses
import json

import numpy as np
from checkpoint_state import latest

from jrec.app.build import build_layout, build_model, build_optimizer
from jrec.app.config import load_config
from jrec.app.dataset import evaluation_config, plan_of
from jrec.data.bijection import save_order
from jrec.data.blocks import ListColumn, ShardWriter, shard_file
from jrec.data.schema import CategoricalFeature, DenseFeature, Schema, Split, Table
from jrec.prepare.fae_pack import HotSet, pack

ITEMS, USERS, BLOCK = 300, 70, 64


def write_dataset(folder, *, counts=(500, 130), seed=0, empty_lists=False, bijection=False, damage=None):
    """Two tables, a one-hot feature of each, weighted lists of the first, and two splits."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    splits = {}
    for split, sizes in (("train", counts), ("valid", (90,))):
        shards = []
        for number, count in enumerate(sizes):
            lengths = np.zeros(count, int) if empty_lists else rng.integers(0, 4, count)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            columns = {
                "label": rng.integers(0, 2, count).astype(np.float32),
                "price": rng.random(count, np.float32),
                "item": (rng.zipf(1.3, count) % ITEMS).astype(np.uint16),
                "user": (rng.zipf(1.5, count) % USERS).astype(np.uint8),
                "history": ListColumn(offsets, (rng.zipf(1.3, offsets[-1]) % ITEMS).astype(np.uint16)),
                "history:weight": ListColumn(offsets, rng.random(offsets[-1], np.float32)),
            }
            if damage is not None and split == "train" and number == 1:
                damage(columns)
            with ShardWriter(folder / shard_file(split, number, len(sizes)), BLOCK) as writer:
                writer.write(columns)
            shards.append(writer.close())
        splits[split] = Split(shards=tuple(shards))
    tables = [Table(name="items", rows=ITEMS, oov_row=3), Table(name="users", rows=USERS)]
    if bijection:
        order = rng.permutation(ITEMS).astype(np.uint32)
        tables[0] = dataclasses.replace(tables[0], bijection=save_order(folder, "items", order))
    schema = Schema(
        name="shop",
        block_size=BLOCK,
        dense=(DenseFeature(name="price"),),
        categorical=(
            CategoricalFeature(name="item", table="items", fixed_length=True),
            CategoricalFeature(name="user", table="users", fixed_length=True),
            CategoricalFeature(name="history", table="items", max_length=3, weighted=True),
        ),
        tables=tuple(tables),
        splits=splits,
        provenance={"made": "here"},
        ceiling={"train": {"auc": 0.9}, "valid": {"auc": 0.8}},
    )
    schema.save(folder)
    return folder


def hot_set(folder, items=None, users=None, seed=1):
    """Random rows, or those given."""
    rng = np.random.default_rng(seed)
    items = np.union1d(np.arange(8), rng.choice(ITEMS, 60, replace=False)) if items is None else items
    users = np.union1d(np.arange(4), rng.choice(USERS, 20, replace=False)) if users is None else users
    rows = {"items": np.asarray(items, np.uint32), "users": np.asarray(users, np.uint32)}
    return HotSet(rows=rows, dataset=Schema.load(folder).identity, threshold=1e-3, calibration={"why": "chosen"})


def packed(source, folder, share):
    """The dataset with the most accessed ``share`` of each table's rows hot."""
    schema = Schema.load(source)
    rows = {t.name: np.arange(round(share(t) * t.rows), dtype=np.uint32) for t in schema.tables}
    return pack(source, folder, HotSet(rows=rows, dataset=schema.identity)).folder


def config_of(folder):
    return load_config(folder / "config.toml")


def rows_of(folder):
    """Every row and slot of a run's last checkpoint, by stack as the device tier calls it."""
    config = device_config(evaluation_config(config_of(folder)))
    schema = Schema.load(config.data.path)
    layout = build_layout(config, schema, plan_of(config))
    slots = build_optimizer(config, build_model(config, schema, layout), 1).embedding.slots
    saved, found = latest(folder), {}
    for name, stack in layout.stacks.items():
        rows = np.arange(stack.rows)
        found[name] = saved.read(stack, "values", rows).tobytes()
        found |= {f"{name}.{slot}": saved.read(stack, slot, rows).tobytes() for slot in slots}
    return found


def device_config(config):
    """The same run with all rows on one device, in no particular order of batches."""
    config = dataclasses.replace(config, schedule="plain")
    mesh, tables = dataclasses.replace(config.mesh, devices=0), dataclasses.replace(config.tables, tier="sharded")
    return dataclasses.replace(config, tables=tables, mesh=mesh, plan="")


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
