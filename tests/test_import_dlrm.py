"""Weights of PyTorch's DLRMs: files are read without being run, and the runs made of them give the same logits."""

import os
import pathlib
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch_files
from checkpoint_state import latest
from run_cases import quickstart

from jrec.app.evaluate import restore_run
from jrec.app.imports import import_dlrm, read_dlrm, read_state_dict
from jrec.app.loaders import eval_loader
from jrec.app.loop import train
from jrec.cli import main
from jrec.data.schema import Schema
from jrec.data.vocabulary_file import table_values
from jrec.errors import CheckpointError, ConfigError

DIM = 4
PEERS = pathlib.Path(os.environ.get("JREC_PEERS_PYTHON", pathlib.Path(__file__).parents[1] / ".venv-peers/bin/python"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=600)


def layer(rng, inputs, outputs):
    return rng.normal(0, 0.3, (outputs, inputs)).astype("f4"), rng.normal(0, 0.3, outputs).astype("f4")


def weights_of(dataset, kind, dtype="f4"):
    """Tables, bottom MLP, top MLP and cross layers of a random model on the dataset, in PyTorch's orientation."""
    rng, schema = np.random.default_rng(0), Schema.load(dataset)
    tables = [rng.normal(size=(schema.table(f.table).rows, DIM)).astype(dtype) for f in schema.categorical]
    count = len(tables) + 1
    width = DIM + count * (count - 1) // 2 if kind == "dot" else DIM * count
    bottom = [layer(rng, len(schema.dense), 6), layer(rng, 6, DIM)]
    top = [layer(rng, width, 5), layer(rng, 5, 1)]
    crosses = [(*layer(rng, width, 3)[:1], layer(rng, 3, width)[0], layer(rng, 3, width)[1]) for _ in range(2)]
    return tables, bottom, top, crosses if kind == "dcn" else []


def facebook(tables, bottom, top, crosses):
    assert not crosses
    named = {f"emb_l.{n}.weight": table for n, table in enumerate(tables)}
    for mlp, layers in (("bot_l", bottom), ("top_l", top)):
        for n, (weight, bias) in enumerate(layers):
            named |= {f"{mlp}.{2 * n}.weight": weight, f"{mlp}.{2 * n}.bias": bias}
    return named


def torchrec(tables, bottom, top, crosses):
    named = {
        f"module.model.sparse_arch.embedding_bag_collection.embedding_bags.t_cat_{n}.weight": table
        for n, table in reversed(list(enumerate(tables)))
    }
    for n, (weight, bias) in enumerate(bottom):
        prefix = f"module.model.dense_arch.model._mlp.{n}._linear"
        named |= {f"{prefix}.weight": weight, f"{prefix}.bias": bias}
    for n, (down, up, bias) in enumerate(crosses):
        prefix = "module.model.inter_arch.crossnet"
        named |= {f"{prefix}.V_kernels.{n}": down, f"{prefix}.W_kernels.{n}": up, f"{prefix}.bias.{n}": bias[:, None]}
    for n, (weight, bias) in enumerate(top[:-1]):
        prefix = f"module.model.over_arch.model.0._mlp.{n}._linear"
        named |= {f"{prefix}.weight": weight, f"{prefix}.bias": bias}
    return named | {
        "module.model.over_arch.model.1.weight": top[-1][0],
        "module.model.over_arch.model.1.bias": top[-1][1],
    }


def logits_of(weights, kind, source, dense, ids):
    """The model's logits in float64, by the authors' formulas and orders."""
    tables, bottom, top, crosses = weights

    def mlp(x, layers, last):
        for n, (weight, bias) in enumerate(layers):
            x = x @ weight.astype("f8").T + bias
            x = np.maximum(x, 0) if last or n + 1 < len(layers) else x
        return x

    x = mlp(dense.astype("f8"), bottom, True)
    vectors = np.stack([x, *(table.astype("f8")[rows] for table, rows in zip(tables, ids, strict=True))], axis=1)
    count = vectors.shape[1]
    if kind == "dot" and source == "facebook":  # interact_features: li, lj = i, j for i in range(ni) for j in range(i)
        pairs = [(i, j) for i in range(count) for j in range(i)]
    else:  # InteractionArch: triu_indices(F + 1, F + 1, offset=1)
        pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    joined = vectors.reshape(len(x), -1)
    if kind == "dot":
        joined = np.concatenate([x, *((vectors[:, i] * vectors[:, j]).sum(1)[:, None] for i, j in pairs)], axis=1)
    first = joined
    for down, up, bias in crosses:
        joined = first * (joined @ down.astype("f8").T @ up.astype("f8").T + bias) + joined
    return mlp(joined, top, False)[:, 0]


def examples_of(run):
    """Dense features and ids by feature of the test split, in the schema's order."""
    dense, ids, masks = [], [], []
    loader = eval_loader(run.config, run.schema, run.layout, "test")
    order = [feature.name for feature in run.schema.categorical]
    for batch in loader:
        found = {}
        for stack in run.layout.members:
            size = len(batch.labels)
            for feature in stack.features:
                begin = feature.first_bag * size
                found[feature.config.name] = (
                    np.asarray(batch.bags[stack.name].ids)[begin : begin + size, 0] - feature.base
                )
        dense.append(batch.dense)
        ids.append([found[name] for name in order])
        masks.append(np.asarray(batch.mask) > 0)
    mask = np.concatenate(masks)
    return np.concatenate(dense)[mask], np.concatenate(ids, axis=1)[:, mask]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("facebook", "dot"),
        pytest.param("facebook", "concat", marks=pytest.mark.slow),
        pytest.param("torchrec", "dot", marks=pytest.mark.slow),
        ("torchrec", "dcn"),
    ],
)
def test_imported_models_give_the_authors_logits(tmp_path, dataset, source, kind):
    weights = weights_of(dataset, kind)
    named = (facebook if source == "facebook" else torchrec)(*weights)
    file = torch_files.save(tmp_path / "dlrm.pt", named, inside="state_dict" if source == "facebook" else None)
    config = import_dlrm(file, dataset, tmp_path / "run")
    assert config.model.interaction == kind
    run = restore_run(tmp_path / "run")
    expected = logits_of(weights, kind, source, *examples_of(run))
    np.testing.assert_allclose(run.scores("test").logits, expected, rtol=2e-5, atol=2e-5)


def test_both_formats_import_to_the_same_run(tmp_path, dataset):
    named = facebook(*weights_of(dataset, "dot"))
    safetensors.numpy.save_file(named, tmp_path / "a")
    torch_files.save(tmp_path / "b", named)
    for file in "ab":
        assert main(["import-dlrm", str(tmp_path / file), str(dataset), "--out", str(tmp_path / f"run_{file}")]) == 0
    folder, other = tmp_path / "run_a/checkpoints", tmp_path / "run_b/checkpoints"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > len(named)
    for path in files:
        assert path.read_bytes() == (other / path.relative_to(folder)).read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("tables.tier='host'",), ("optimizer.embedding.name='rowwise_adagrad'",)])
def test_imported_runs_train_on(tmp_path, dataset, overrides):
    file = torch_files.save(tmp_path / "dlrm.pt", facebook(*weights_of(dataset, "dot")))
    config = import_dlrm(file, dataset, tmp_path / "run", overrides=[*overrides, "log.tensorboard=false"])
    before = restore_run(tmp_path / "run").scores("test").logits
    outcome = train(config, resume=True)
    assert outcome.step > 0
    assert np.abs(outcome.scores["test"].logits - before).max() > 0


def test_rows_of_other_numbers_and_dtypes(tmp_path, dataset, capsys):
    schema = Schema.load(dataset)
    tables, bottom, top, _ = weights_of(dataset, "dot", dtype="f2")
    table = schema.categorical[0].table
    rows = len(tables[0])
    numbers = np.random.default_rng(1).permutation(rows + 3)[:rows]
    numbers[numbers == 0], numbers[2] = numbers[2], -1
    larger = np.zeros((rows + 3, DIM), "f2")
    larger[numbers] = tables[0]
    tables[0][2] = 0
    larger[np.setdiff1d(np.arange(rows + 3), numbers)] = np.nan  # row 0 among them
    np.save(tmp_path / f"{table}.npy", numbers)
    file = torch_files.save(tmp_path / "dlrm.pt", facebook([larger, *tables[1:]], bottom, top, []))
    with pytest.raises(
        ConfigError, match=rf"'{table}' has {rows} rows in the dataset and {rows + 3} in the checkpoint"
    ):
        import_dlrm(file, dataset, tmp_path / "run")
    out = str(tmp_path / "run")
    assert main(["import-dlrm", str(file), str(dataset), "--out", out, "--rows", str(tmp_path)]) == 0
    assert "rows of 4 float16" in capsys.readouterr().out
    run = restore_run(out)
    expected = logits_of((tables, bottom, top, []), "dot", "facebook", *examples_of(run))
    np.testing.assert_allclose(run.scores("test").logits, expected, rtol=2e-4, atol=2e-4)
    np.save(tmp_path / f"{table}.npy", numbers + 9)
    with pytest.raises(ConfigError, match=r"values from 8 to"):
        import_dlrm(file, dataset, tmp_path / "other", rows=tmp_path)
    for content in (b"", b"PK\x03\x04", b"\x93NUMPY\1\0\2\0{("):
        (tmp_path / f"{table}.npy").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read as a NumPy array"):
            import_dlrm(file, dataset, tmp_path / "other", rows=tmp_path)


# What is refused.


@pytest.mark.parametrize("cap", [(), ("--max-rows", "3")])
def test_rows_that_prepare_numbered_are_not_taken_for_pytorchs_ids(tmp_path, cap):
    """Row i is the i-th most frequent value, or bucket: without --rows its vector would be another value's."""
    lines = [f"{n % 2},{n},{n * n % 7}" for n in range(60)]
    (tmp_path / "log.csv").write_text("\n".join(["label,x,a", *lines]) + "\n")
    columns = '[label]\ncolumn = "label"\n[[dense]]\ncolumn = "x"\n[[categorical]]\ncolumn = "a"\n'
    (tmp_path / "columns.toml").write_text(columns)
    command = ["prepare", "csv", "--schema", f"{tmp_path}/columns.toml", "--input", f"{tmp_path}/log.csv"]
    assert main([*command, "--out", f"{tmp_path}/data", "--min-count", "1", "--quiet", *cap]) == 0
    rows = Schema.load(tmp_path / "data").table("a").rows
    rng = np.random.default_rng(0)
    table = rng.normal(size=(rows, DIM)).astype("f4")
    named = facebook([table], [layer(rng, 1, 6), layer(rng, 6, DIM)], [layer(rng, DIM + 1, 1)], [])
    file = torch_files.save(tmp_path / "dlrm.pt", named)
    with pytest.raises(ConfigError, match=r"'a' of .*numbered by frequency.* a\.npy of a folder of --rows"):
        import_dlrm(file, tmp_path / "data", tmp_path / "run")
    with pytest.raises(ConfigError, match="numbered by frequency"):  # the folder says nothing of this table
        import_dlrm(file, tmp_path / "data", tmp_path / "run", rows=tmp_path)
    assert not (tmp_path / "run").exists()
    np.save(tmp_path / "a.npy", np.arange(rows))
    import_dlrm(file, tmp_path / "data", tmp_path / "run", rows=tmp_path)
    np.testing.assert_array_equal(latest(tmp_path / "run").table("a").read("values", np.arange(rows)), table)
    if cap:
        pq.write_table(pa.table({"a": [*range(7)]}), tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=r"a\.parquet of --rows has values, but table 'a' has no vocabulary"):
            import_dlrm(file, tmp_path / "data", tmp_path / "other", rows=tmp_path)


def test_rows_are_those_of_the_values_that_pytorchs_ids_had(tmp_path):
    (tmp_path / "log.csv").write_text(
        "\n".join(["label,x,a", *(f"{n % 2},{n},w{n * n % 7}" for n in range(60))]) + "\n"
    )
    (tmp_path / "columns.toml").write_text(
        '[label]\ncolumn = "label"\n[[dense]]\ncolumn = "x"\n[[categorical]]\ncolumn = "a"\n'
    )
    command = ["prepare", "csv", "--schema", f"{tmp_path}/columns.toml", "--input", f"{tmp_path}/log.csv"]
    assert main([*command, "--out", f"{tmp_path}/data", "--min-count", "1", "--quiet"]) == 0
    rng, values = np.random.default_rng(0), ["w9", "w4", "w1", "w0", "w8"]  # w2 is in the log, and w9 and w8 are not
    table = rng.normal(size=(len(values), DIM)).astype("f4")
    named = facebook([table], [layer(rng, 1, 6), layer(rng, 6, DIM)], [layer(rng, DIM + 1, 1)], [])
    file = torch_files.save(tmp_path / "dlrm.pt", named)
    pq.write_table(pa.table({"value": values}), tmp_path / "a.parquet")
    import_dlrm(file, tmp_path / "data", tmp_path / "run", rows=tmp_path)
    schema = Schema.load(tmp_path / "data")
    own = table_values(tmp_path / "data", schema, schema.table("a")).to_pylist()
    rows = latest(tmp_path / "run").table("a").read("values", np.arange(len(own)))
    expected = [table[values.index(value)] if value in values else np.zeros(DIM) for value in own]
    np.testing.assert_array_equal(rows, expected)
    assert {"w0", "w1", "w2", "w4"} <= set(own)
    for content, message in (
        ({"value": ["w1", "w1"]}, "'w1' is there twice"),
        ({"value": ["x"]}, "none of the 1 values, such as 'x'"),
        ({"value": ["w1"], "id": [0]}, "has the columns value, id; give one"),
    ):
        pq.write_table(pa.table(content), tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=message):
            import_dlrm(file, tmp_path / "data", tmp_path / "other", rows=tmp_path)


def test_other_models_are_refused(dataset):
    named = facebook(*weights_of(dataset, "dot"))
    tables, bottom, top, _ = weights_of(dataset, "dot")
    for changes, match in (
        ({"emb_l.0.weight_q": tables[0]}, "has emb_l.0.weight_q, which no DLRM"),
        ({"v_W_l.0": tables[0]}, "weighted-pooling"),
        ({"emb_l.12.weight": tables[0]}, "some are missing"),
        ({"module.emb_l.0.weight": tables[0]}, "with and without 'module.'"),
        ({"emb_l.0.weight": tables[0].astype(np.int8)}, "emb_l.0.weight is int8, but weights are of"),
        ({"emb_l.0.weight": tables[0][:, :2]}, "must have one dim"),
        ({"top_l.0.weight": top[0][0][:, :-1]}, "inputs, but 11 vectors of 4 give 59 by dot and 44 by concat"),
        ({"top_l.0.weight": np.zeros((5, 70), "f4")}, "arch-interaction-itself"),
        ({"top_l.2.weight": np.zeros((2, 5), "f4"), "top_l.2.bias": np.zeros(2, "f4")}, "has 2 outputs"),
        ({"bot_l.0.bias": bottom[0][1][:2]}, "layer 0 of the bottom MLP lacks"),
        ({"bot_l.2.weight": np.zeros((4, 9), "f4")}, "does not take what the one before it gives"),
    ):
        with pytest.raises(CheckpointError, match=match):
            read_dlrm(named | changes)
    with pytest.raises(CheckpointError, match="no weights of a DLRM's tables and bottom MLP"):
        read_dlrm({"over_arch.model.1.weight": top[1][0], "over_arch.model.1.bias": top[1][1]})


def test_other_cross_networks_are_refused(dataset):
    named = torchrec(*weights_of(dataset, "dcn"))
    prefix = "module.model.inter_arch.crossnet"
    down, up = named[f"{prefix}.V_kernels.0"], named[f"{prefix}.W_kernels.0"]
    wider = {
        f"{prefix}.V_kernels.0": np.pad(down, ((0, 0), (0, 1))),
        f"{prefix}.W_kernels.0": np.pad(up, ((0, 1), (0, 0))),
    }
    wider[f"{prefix}.bias.0"] = np.zeros(len(up) + 1, np.float32)
    for changes, match in (
        (wider, "must take all 44 elements"),
        ({f"{prefix}.V_kernels.0": down[0], f"{prefix}.W_kernels.0": down[0]}, "cross layer 0 lacks"),
        ({f"{prefix}.V_kernels.0": down[:, 1:]}, "do not fit"),
        ({f"{prefix}.bias.0": named[f"{prefix}.bias.0"], f"other.{prefix}.bias.0": up}, "another tensor for the same"),
    ):
        with pytest.raises(CheckpointError, match=match):
            read_dlrm(named | changes)


def test_an_order_that_is_not_the_models_is_not_taken(tmp_path, dataset):
    named = torchrec(*weights_of(dataset, "dot"))
    safetensors.numpy.save_file(named, tmp_path / "a.safetensors")
    numbered = read_dlrm(read_state_dict(tmp_path / "a.safetensors"))
    expected = read_dlrm(named)
    for name, table in expected.tables.items():
        np.testing.assert_array_equal(numbered.tables[name], table)
    named = {name.replace("t_cat_", "t_table"): array for name, array in named.items()}
    assert next(iter(read_dlrm(named).tables)) == f"table{len(expected.tables) - 1}"
    safetensors.numpy.save_file(named, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="in the model's order, which safetensors files do not keep"):
        read_dlrm(read_state_dict(tmp_path / "a.safetensors"))


def test_models_that_do_not_fit_the_dataset_are_refused(tmp_path, dataset):
    tables, bottom, top, _ = weights_of(dataset, "concat")
    fewer = facebook(tables[:-1], bottom, [(top[0][0][:, DIM:], top[0][1]), top[1]], [])
    with pytest.raises(ConfigError, match="10 categorical features have 10 tables, but the model has 9"):
        import_dlrm(torch_files.save(tmp_path / "a.pt", fewer), dataset, tmp_path / "run")
    named = facebook(tables, bottom, top, [])
    file = torch_files.save(tmp_path / "a.pt", named)
    with pytest.raises(ConfigError, match="leave out"):
        import_dlrm(file, dataset, tmp_path / "run", overrides=["model.top_mlp=[3,1]"])
    with pytest.raises(ConfigError, match="jrec compress"):
        import_dlrm(file, dataset, tmp_path / "run", overrides=["tables.tt.largest=1", "tables.tt.rank=2"])
    named["bot_l.0.weight"] = named["bot_l.0.weight"][:, 1:]
    with pytest.raises(ConfigError, match="8 dense features, but the model 7"):
        import_dlrm(torch_files.save(tmp_path / "a.pt", named), dataset, tmp_path / "run")


TORCH = """
import sys, numpy as np, torch
from torch import nn
folder = sys.argv[1]
rows, seed = np.load(f"{folder}/rows.npy").tolist(), torch.manual_seed(0)
def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return layers
class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        n = len(rows) + 1
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(r, 4, mode="sum") for r in rows)
        self.bot_l = nn.Sequential(*mlp(8, 6, 4))
        self.top_l = nn.Sequential(*mlp(4 + n * (n - 1) // 2, 5, 1)[:-1], nn.Sigmoid())
    def forward(self, dense, ids):
        x = self.bot_l(dense)
        z = torch.stack([x, *(e(i[:, None]) for e, i in zip(self.emb_l, ids))], 1)
        zz, n = torch.bmm(z, z.transpose(1, 2)), z.shape[1]
        li = torch.tensor([i for i in range(n) for j in range(i)])
        lj = torch.tensor([j for i in range(n) for j in range(i)])
        return self.top_l(torch.cat([x, zz[:, li, lj]], 1))
model = DLRM()
torch.save({"iter": 3, "train_loss": np.float64(0.5), "state_dict": model.state_dict(),
            "opt_state_dict": torch.optim.SGD(model.parameters(), lr=0.1).state_dict()}, f"{folder}/dlrm.pt")
if len(sys.argv) > 2:
    given = np.load(f"{folder}/examples.npz")
    with torch.no_grad():
        p = model(torch.tensor(given["dense"]), torch.tensor(given["ids"]).long())[:, 0].double()
    np.save(f"{folder}/logits.npy", torch.log(p / (1 - p)).numpy())
"""


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="PyTorch is in .venv-peers; see benchmarks/peers/README.md")
def test_a_file_of_pytorch_gives_its_logits(tmp_path, dataset):
    schema = Schema.load(dataset)
    np.save(tmp_path / "rows.npy", [schema.table(f.table).rows for f in schema.categorical])
    (tmp_path / "torch_dlrm.py").write_text(TORCH)
    command = [str(PEERS), str(tmp_path / "torch_dlrm.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    import_dlrm(tmp_path / "dlrm.pt", dataset, tmp_path / "run")
    run = restore_run(tmp_path / "run")
    dense, ids = examples_of(run)
    np.savez(tmp_path / "examples.npz", dense=dense, ids=ids)
    subprocess.run([*command, "examples"], check=True)
    np.testing.assert_allclose(run.scores("test").logits, np.load(tmp_path / "logits.npy"), rtol=1e-4, atol=1e-5)
