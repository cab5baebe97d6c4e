"""Tables in safetensors files as their bytes say, by nothing of jrec, and a model that trains such a table."""

import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx

import jrec
from jrec.nn import NGramMemory, ngram_rows

DTYPES = {
    "F32": "<f4", "BF16": "<u2", "F16": "<f2", "F8_E4M3": "u1", "F8_E8M0": "u1", "I8": "i1", "U8": "u1", "F64": "<f8",
}  # fmt: skip


def plain_tensors(folder):
    """Each tensor of a folder as its bytes say, by nothing of jrec: two bytes for bfloat16, one for 8 bits."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors, size = {}, 0
    for name in sorted(set(index["weight_map"].values())):
        data = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        for tensor, entry in header.items():
            begin, stop = entry["data_offsets"]
            content = data[8 + length + begin : 8 + length + stop]
            tensors[tensor] = np.frombuffer(content, DTYPES[entry["dtype"]]).reshape(entry["shape"])
            assert index["weight_map"][tensor] == name
            size += len(content)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == size
    return tensors


def e4m3(byte):
    """One sign, four bits of the exponent, three of the fraction."""
    sign, exponent, fraction = -1 if byte & 128 else 1, (byte >> 3) & 15, byte & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def rows_of_bytes(values, exponents, width):
    """Rows of FP8 bytes with an exponent for each ``width`` elements, element by element."""
    rows = np.empty(values.shape)
    for i, j in np.ndindex(*values.shape):
        rows[i, j] = e4m3(int(values[i, j])) * 2.0 ** (int(exponents[i, j // width]) - 127)
    return rows


def fp8_table(rows=50, dim=64, seed=0):
    """Values and scales as DeepSeek-V4.1 has its Engram tables: an exponent for 32 elements of a row."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (rows, dim), np.uint8)
    values[values & 127 == 127] = 0  # NaN
    return values.view(ml_dtypes.float8_e4m3fn), rng.integers(110, 135, (rows, dim // 32), np.uint8).view(
        ml_dtypes.float8_e8m0fnu
    )


class Model(nnx.Module):
    """Scores of the next of 20 tokens, by an Engram with the demo's gate."""

    def __init__(self, config, tier):
        layout = jrec.EmbeddingLayout.build([config.table(tier=tier)], [config.feature(12)])
        rngs = nnx.Rngs(0)
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        self.memory = NGramMemory(config, 16, gate="signed_sqrt", use_bias=True, rngs=rngs)
        self.out = nnx.Linear(16, 20, rngs=rngs)

    def logits(self, dense, activations, bags):
        rows = self.embeddings.features(activations, bags)["ngram"]
        return self.out(self.memory(jnp.zeros((dense.shape[0], 12, 16)), rows))


def loss_of(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.extras["next"])
    return jrec.nn.mean_of_positions(losses, batch.extras["next"] >= 0, batch.mask)


def batches(config, touched, steps=100):
    """Texts in which each token follows from the two before, by a fixed table; notes the rows that they read."""
    following = np.random.default_rng(0).integers(0, 20, (20, 20))
    for seed in range(steps):
        text = list(np.random.default_rng(seed).integers(0, 20, (2, 16)))
        for _ in range(11):
            text.append(following[text[-2], text[-1]])
        text = np.stack(text, axis=1)
        rows = ngram_rows(config, text[:, :-1]).reshape(16, -1)
        touched[rows] = True
        yield {"ngram": rows, "next": text[:, 1:].astype(np.int32)}
