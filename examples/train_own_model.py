"""How do I train a model of my own by the jrec command? An attentional factorization machine, by a configuration.

python examples/train_own_model.py
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jrec
from jrec import cli

CONFIG = """
epochs = 2
[data]
batch_size = 256
[model]
factory = "train_own_model:make"  # this file; of the keys of [model], those below say what tables there are
embedding_dim = 16
[model.options]                   # keyword arguments of the factory
attention = 16
hidden = [64, 32]
[optimizer]
name = "adam"
learning_rate = 0.002
[optimizer.embedding]
name = "adam"
learning_rate = 0.005
[log]
progress = "off"
tensorboard = false
"""


class AFM(nnx.Module):
    """Attentional factorization machine (Xiao et al. 2017): a weighted sum of all pairs' products, beside an MLP."""

    def __init__(
        self,
        embeddings: jrec.nn.EmbeddingCollection,
        *,
        num_dense: int,
        attention: int,
        hidden: Sequence[int],
        rngs: nnx.Rngs,
    ):
        self.embeddings = embeddings  # under this name; its rows may live on devices, in host memory, in cores
        features = embeddings.layout.features
        dim = features[0][1]
        width = num_dense + sum(feature.vectors * dim for feature, dim in features)
        self.attention, self.score = nnx.Linear(dim, attention, rngs=rngs), nnx.Linear(attention, 1, rngs=rngs)
        self.mlp = jrec.nn.MLP((width, *hidden), activate_last=True, rngs=rngs)
        self.out = nnx.Linear(hidden[-1] + dim, 1, rngs=rngs)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> jax.Array:
        """(batch,) float32."""
        vectors = jnp.concatenate(self.embeddings.vectors(activations, bags), axis=1)  # (batch, vectors, dim)
        batch, count, dim = vectors.shape
        first, second = np.triu_indices(count, 1)
        products = vectors[:, first] * vectors[:, second]
        weights = jax.nn.softmax(self.score(jax.nn.relu(self.attention(products))), axis=1)
        deep = self.mlp(jnp.concatenate([dense, vectors.reshape(batch, count * dim)], axis=1))
        return self.out(jnp.concatenate([deep, jnp.sum(weights * products, axis=1)], axis=1))[:, 0]


def make(
    embeddings: jrec.nn.EmbeddingCollection,
    *,
    num_dense: int,
    rngs: nnx.Rngs,
    attention: int = 8,
    hidden: Sequence[int] = (32,),
) -> AFM:
    """The factory: jrec gives it the tables of the configuration and the dataset, and the options."""
    return AFM(embeddings, num_dense=num_dense, attention=attention, hidden=hidden, rngs=rngs)


def main(rows: int = 40_000) -> dict[str, float]:
    """Trains and exports; returns test AUCs, the model's and the best single feature's."""
    sys.path.append(str(pathlib.Path(__file__).parent))  # the `jrec` command itself finds modules in its own folder
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        data, run, export = (str(folder / name) for name in ("data", "run", "export"))
        (folder / "own.toml").write_text(CONFIG)
        for command in (
            ["synth", "--like", "quickstart", "--rows", str(rows), "--out", data, "--quiet"],
            ["train", str(folder / "own.toml"), f"data.path={data}", f"out={run}", "model.options.attention=8"],
            ["export", run, "--out", export, "--quiet"],
        ):
            if code := cli.main(command):
                raise SystemExit(code)
        report = json.loads((folder / "run" / "report" / "metrics.json").read_text())
        served = jrec.serving.load(export)  # needs this file no more
        print(f"{export}: step {served.manifest.step:,} of run {served.manifest.run}")
    scores = {"model": report, "popularity": report["baselines"]["popularity"]}
    return {name: found["splits"]["test"]["auc"] for name, found in scores.items()}


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
