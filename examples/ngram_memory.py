"""How do I put rows for hashed n-grams into a Flax NNX transformer? A language model of bytes, with and without them.

python examples/ngram_memory.py    (trains on the Python files of the standard library; three minutes on two cores)
"""

import pathlib
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec

LENGTH, WIDTH, HEADS, BLOCKS, BATCH = 64, 64, 4, 2, 32
NGRAMS = jrec.nn.NGramConfig(rows=400_000, dim=16, sizes=(2, 3, 4), heads=2)


class Block(nnx.Module):
    """Causal attention and a position-wise network."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.back = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, WIDTH) to the same."""
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[:, :, 0]))
        return x + self.back(jax.nn.gelu(self.hidden(self.norms[1](x))))


class LanguageModel(nnx.Module):
    """A transformer of bytes; the memory's rows come in before its first block."""

    def __init__(self, *, memory: bool, rngs: nnx.Rngs):
        byte = jrec.TableConfig(name="byte", rows=256, dim=WIDTH, initial_bound=0.1)
        feature = jrec.FeatureConfig(name="byte", table="byte", max_length=LENGTH, pooling="none")
        tables, features = ([NGRAMS.table()], [NGRAMS.feature(LENGTH)]) if memory else ([], [])
        layout = jrec.EmbeddingLayout.build([byte, *tables], [feature, *features])
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        self.memory = jrec.nn.NGramMemory(NGRAMS, WIDTH, rngs=rngs) if memory else None
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(BLOCKS)])
        self.norm, self.out = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 256, rngs=rngs)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> jax.Array:
        """(batch, LENGTH, 256) scores of each next byte."""
        del dense
        rows = self.embeddings.features(activations, bags)
        x = rows["byte"] + self.positions[...]
        if self.memory is not None:
            x = x + self.memory(x, rows["ngram"])
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def loss_of(logits: jax.Array, batch: jrec.Batch) -> jax.Array:
    """The mean over all positions, in bits."""
    following = batch.extras["next"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following) / jnp.log(2)
    return jrec.nn.mean_of_positions(losses, following >= 0, batch.mask)


def batches(text: np.ndarray, count: int, seed: int, *, memory: bool) -> Iterator[dict[str, np.ndarray]]:
    """Pieces of the text; the rows of their n-grams are hashed here, in the loader."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        piece = text[rng.integers(0, len(text) - LENGTH - 1, BATCH)[:, None] + np.arange(LENGTH + 1)]
        columns = {"byte": piece[:, :-1].astype(np.int64), "next": piece[:, 1:].astype(np.int32)}
        yield columns | ({"ngram": jrec.nn.ngram_rows(NGRAMS, piece[:, :-1]).reshape(BATCH, -1)} if memory else {})


def main(steps: int = 600) -> dict[str, float]:
    """Trains two models, and serves one; returns the bits a byte of files that neither has seen."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train, later = (
        np.frombuffer(b"".join(f.read_bytes() for f in part), np.uint8) for part in (files[::2], files[1::2])
    )
    bits = {}
    for name, memory in (("transformer", False), ("with memory", True)):
        model = LanguageModel(memory=memory, rngs=nnx.Rngs(0))
        rows = jrec.ops.RowWiseAdagrad(learning_rate=0.1)
        optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows)
        with jrec.distribute(model, optimizer) as run:
            step = run.compile(loss=loss_of)
            for batch in run.feed(batches(train, steps, 0, memory=memory), label=None, extras=["next"]):
                loss, _ = step(batch)
                if run.steps % 100 == 0:
                    print(f"{name}, step {run.steps}: {float(loss):.3f} bits a byte")
            bits[name] = bits_of(run.predict, later, memory=memory)
            if memory:  # the rows as a server would hold them: 8 bits an element, and a scale a row
                with tempfile.TemporaryDirectory() as folder:
                    run.export(pathlib.Path(folder) / "model", dtype="int8")
                    served = jrec.serving.load(pathlib.Path(folder) / "model", batch_sizes=[BATCH])
                    bits["with memory, served from INT8 rows"] = bits_of(served.logits, later, memory=True)
    return bits


def bits_of(predict: Callable[[dict[str, np.ndarray]], np.ndarray], text: np.ndarray, *, memory: bool) -> float:
    """The mean bits of a byte of pieces of a text, by a model's scores."""
    found = []
    for columns in batches(text, 10, 1, memory=memory):
        following = columns.pop("next")
        scores = jax.nn.log_softmax(np.asarray(predict(columns)))
        found.append(-np.take_along_axis(np.asarray(scores), following[:, :, None], axis=2).mean() / np.log(2))
    return float(np.mean(found))


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
