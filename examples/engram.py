"""How do I train an Engram table in JAX? From published files, under a frozen model, to an edit that is served.

python examples/engram.py    (learns Python code, then, by rows alone, its manual; two minutes on two cores)
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

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH = 256, 64, 64, 4, 32
HASHING = jrec.nn.NGramHashing.preset("engram-demo", vocabulary=VOCABULARY, head_rows=(20_000, 20_000), heads=4)
NGRAMS, ENGRAM_LAYERS = jrec.nn.NGramConfig.of(HASHING, dim=32), (1,)
NAME = "layers.1.engram.embed.weight"
FORMAT = jrec.table_files.TableFormat(name=NAME, dtype="float8_e4m3fn", scale="layers.1.engram.embed.scale")


class DecoderLayer(nnx.Module):
    """Causal attention and a position-wise network, with an Engram in front where the layer has one."""

    def __init__(self, *, engram: bool, rngs: nnx.Rngs):
        self.engram = jrec.nn.NGramMemory(NGRAMS, WIDTH, gate="signed_sqrt", rngs=rngs) if engram else None
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.self_attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.wi, self.wo = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """(batch, length, WIDTH) hidden states, and the rows of their tokens' n-grams, to hidden states."""
        if self.engram is not None:
            x = x + self.engram(x, rows)
        x = x + self.self_attention(self.norms[0](x), mask=nnx.make_causal_mask(x[:, :, 0]))
        return x + self.wo(jax.nn.gelu(self.wi(self.norms[1](x))))


class Decoder(nnx.Module):
    """A language model of bytes; its tables stay out of the parameters, so that no gradient has their size."""

    def __init__(self, *, rngs: nnx.Rngs):
        token = jrec.TableConfig(name="token", rows=VOCABULARY, dim=WIDTH, initial_bound=0.1)
        tokens = jrec.FeatureConfig(name="token", table="token", max_length=LENGTH, pooling="none")
        layout = jrec.EmbeddingLayout.build([token, NGRAMS.table()], [tokens, NGRAMS.feature(LENGTH)])
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.layers = nnx.List([DecoderLayer(engram=layer in ENGRAM_LAYERS, rngs=rngs) for layer in range(2)])
        self.decoder_norm, self.logits_dense = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def logits(self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping) -> jax.Array:
        """(batch, LENGTH, VOCABULARY) scores of each next token."""
        rows = self.embeddings.features(activations, bags)
        x = rows["token"] + self.positions[...]
        for layer in self.layers:
            x = layer(x, rows["ngram"])
        return self.logits_dense(self.decoder_norm(x))


def batches(text: np.ndarray, count: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Pieces of a text, with the rows of their n-grams by the published hash."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        piece = text[rng.integers(0, len(text) - LENGTH - 1, BATCH)[:, None] + np.arange(LENGTH + 1)]
        rows = jrec.nn.ngram_rows(NGRAMS, piece[:, :-1]).reshape(BATCH, -1)
        yield {"token": piece[:, :-1].astype(int), "next": piece[:, 1:].astype(np.int32), "ngram": rows}


def bits_of(predict: Callable[[dict[str, np.ndarray]], np.ndarray], text: np.ndarray) -> float:
    """The mean bits of a byte of pieces of a text, by a model's scores."""
    columns = next(batches(text, 1, 1))
    scores = jax.nn.log_softmax(np.asarray(predict({name: columns[name] for name in ("token", "ngram")})))
    return -float(np.take_along_axis(np.asarray(scores), columns["next"][:, :, None], axis=2).mean() / np.log(2))


def train(run: jrec.Run, text: np.ndarray, steps: int) -> None:
    """Takes steps on pieces of a text."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    step = run.compile(loss=lambda logits, batch: jnp.mean(cross_entropy(logits, batch.extras["next"])))
    for batch in run.feed(batches(text, steps, 0), label=None, extras=["next"]):
        step(batch)


def main(folder: str, steps: int = 300) -> dict[str, float]:
    """Publishes a table, edits its rows, and serves the edit; returns bits a byte of the manual, and bytes of files."""
    library, out, files = pathlib.Path(sysconfig.get_path("stdlib")), pathlib.Path(folder), jrec.table_files
    code = np.frombuffer(b"".join(file.read_bytes() for file in sorted(library.glob("*.py"))), np.uint8)
    learned, later = np.array_split(np.frombuffer((library / "pydoc_data" / "topics.py").read_bytes(), np.uint8), 2)
    model, adagrad = Decoder(rngs=nnx.Rngs(0)), jrec.ops.Adagrad(learning_rate=0.1)
    with jrec.distribute(model, jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=adagrad)) as run:
        train(run, code, steps)
        files.write_table(out / "table", lambda ids: run.rows("ngram", ids), format=FORMAT, rows=NGRAMS.rows, dim=32)
        model, _ = run.modules()
    # Its user: rows from the published files learn the manual, while the dense part and the tokens stay as they are.
    table = files.StoredTable(files.Tensors(out / "table"), NAME)
    frozen = jrec.nn.SparseOptimizer(model, dense=optax.set_to_zero(), embedding=adagrad, tables={"token": None})
    with jrec.distribute(model, frozen) as run:
        for ids, rows in table.chunks():
            run.set_rows("ngram", ids, rows)
        bits = {"published": bits_of(run.predict, later)}
        run.export(out / "served")
        train(run, learned, steps)
        files.write_overlay(out / "edit", lambda ids: run.rows("ngram", ids), like=table)
    # The edit lies over the files, which stay as they are; it becomes files of its own, and goes to servers.
    edited = files.StoredTable(files.Tensors(out / "table"), NAME, overlays=[out / "edit"])
    files.write_table(out / "merged", edited.read, like=edited)
    change = {"ngram": (edited.overlaid, edited.read(edited.overlaid))}
    jrec.serving.write_delta(out / "delta", change, since=[out / "served"])
    served = jrec.serving.load(out / "served", [out / "delta"], batch_sizes=[BATCH])
    sizes = {"rows": table.rows, "rows edited": edited.overlaid.size, "bytes": (out / "edit").stat().st_size}
    return {**bits, "edited and served": bits_of(served.logits, later), **sizes}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print({name: round(value, 3) for name, value in main(temporary).items()})
