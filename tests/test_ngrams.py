"""Rows of hashed n-grams: the same numbers in the loader and in a step, and the memory that gates them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from table_file_cases import loss_of

import jrec
from jrec.nn import NGramConfig, NGramMemory, ngram_rows

CONFIG = NGramConfig(rows=70_000, dim=4, sizes=(1, 2, 3), heads=2, seed=5)


def tokens_of(seed, batch=5, length=40, vocabulary=50):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (batch, length))
    tokens[rng.random((batch, length)) < 0.05] = -1
    return tokens


def test_loader_and_step_number_n_grams_alike():
    for dtype in (np.int32, np.uint8, np.int64):
        tokens = (np.abs(tokens_of(0)) if dtype == np.uint8 else tokens_of(0)).astype(dtype)
        rows = ngram_rows(CONFIG, tokens)
        assert rows.dtype == np.int32
        on_device = jax.jit(lambda tokens: ngram_rows(CONFIG, tokens))(jnp.asarray(tokens))
        np.testing.assert_array_equal(on_device, rows)
    byte = np.array([[255, 0]], np.uint8)  # 255 is a token like others, not what lies before the begin
    np.testing.assert_array_equal(ngram_rows(CONFIG, byte), ngram_rows(CONFIG, byte.astype(int)))


def test_a_row_is_that_of_the_last_tokens_alone():
    tokens = tokens_of(1, vocabulary=4)
    rows = ngram_rows(CONFIG, tokens)
    share = CONFIG.rows // CONFIG.slots
    of_gram: dict = {}
    for b, text in enumerate(tokens):
        for i, token in enumerate(text):
            for slot in range(CONFIG.slots):
                size = CONFIG.sizes[slot // CONFIG.heads]
                if token < 0:
                    assert rows[b, i, slot] == -1
                    continue
                assert share * slot <= rows[b, i, slot] < share * (slot + 1)
                before = [text[j] if j >= 0 else "begin" for j in range(i - size + 1, i + 1)]
                before = ["begin" if t == -1 else t for t in before]  # absent tokens count as none
                assert of_gram.setdefault((slot, *before), rows[b, i, slot]) == rows[b, i, slot]
    assert len(set(of_gram.values())) > 0.98 * len(of_gram)


def test_whatever_negative_number_stands_for_an_absent_token():
    tokens = np.array([[7, -1, 5, 6], [7, -3, 5, 6]])
    for both in (tokens, jnp.asarray(tokens, jnp.int32)):
        first, second = ngram_rows(CONFIG, both)
        np.testing.assert_array_equal(first, second)


def test_rows_are_spread_evenly():
    config = NGramConfig(rows=2 * 1_000, dim=4, sizes=(2,), heads=2)
    pairs = np.stack(np.meshgrid(np.arange(200), np.arange(200)), axis=-1).reshape(-1, 2)
    rows = ngram_rows(config, pairs)[:, 1]
    for slot in range(2):
        counts = np.bincount(rows[:, slot] - 1_000 * slot, minlength=1_000)
        assert 0.8 < counts.var() / counts.mean() < 1.2  # Poisson: the variance is the mean
    shared = rows[:, 0] == rows[0, 0]
    assert len(np.unique(rows[shared, 1])) > 0.9 * shared.sum()  # the heads are independent


class Model(nnx.Module):
    """Scores of the next of 20 tokens, by the n-grams alone."""

    def __init__(self, config, length, *, rngs, tier="sharded"):
        self.embeddings = jrec.nn.EmbeddingCollection(
            jrec.EmbeddingLayout.build([config.table(tier=tier)], [config.feature(length)]), rngs=rngs
        )
        self.memory, self.out = NGramMemory(config, 16, rngs=rngs), nnx.Linear(16, 20, rngs=rngs)

    def logits(self, dense, activations, bags):
        rows = self.embeddings.features(activations, bags)["ngram"]
        return self.out(self.memory(jnp.zeros((dense.shape[0], 12, 16)), rows))


def texts(seed, config, count=16):
    """Each token follows from the two before, by a fixed table."""
    table = np.random.default_rng(0).integers(0, 20, (20, 20))
    rng = np.random.default_rng(seed)
    text = list(rng.integers(0, 20, (2, count)))
    for _ in range(11):
        text.append(table[text[-2], text[-1]])
    text = np.stack(text, axis=1)
    return {"ngram": ngram_rows(config, text[:, :-1]).reshape(count, -1), "next": text[:, 1:].astype(np.int32)}


@pytest.mark.parametrize(("devices", "tier"), [(1, "sharded"), (2, "sharded"), (1, "host")])
def test_a_memory_of_pairs_learns_what_follows_from_two_tokens(devices, tier):
    config = NGramConfig(rows=4_000, dim=8, sizes=(2,), heads=2)
    model = Model(config, 12, rngs=nnx.Rngs(0), tier=tier)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=jrec.ops.Adagrad(learning_rate=0.3))
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
    with jrec.distribute(model, optimizer, mesh=mesh) as run:
        step = run.compile(loss=loss_of)
        feed = run.feed((texts(seed, config) for seed in range(150)), label=None, extras=["next"])
        losses = [float(step(batch)[0]) for batch in feed]
    assert losses[0] > 2.9  # the logarithm of 20
    assert np.mean(losses[-10:]) < 0.6  # the second token of 12 follows from nothing: 0.25


def test_bad_arguments():
    with pytest.raises(ValueError, match="must be from 8, one a slot"):
        NGramConfig(rows=7, dim=4)
    with pytest.raises(ValueError, match="must name an n"):
        NGramConfig(rows=70, dim=4, sizes=())
    with pytest.raises(ValueError, match=r"tokens must be integers of shape \(batch, length\), but are float64"):
        ngram_rows(CONFIG, np.zeros((2, 3)))


def test_the_memory_sees_no_later_token_and_smooths_over_those_before():
    config = NGramConfig(rows=100, dim=3, sizes=(2,), heads=2)
    memory = NGramMemory(config, 8, width=3, rngs=nnx.Rngs(0))
    memory.smooth[...] = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    rng = np.random.default_rng(1)
    hidden, rows = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 9, 8), (1, 9, 2, 3)))
    found = np.asarray(memory(hidden, rows))
    other = rows.copy()
    other[:, 4] = rng.normal(size=(2, 3))
    changed = np.abs(np.asarray(memory(hidden, other)) - found).max(axis=2)[0] > 0
    np.testing.assert_array_equal(np.flatnonzero(changed), [4, 6, 8])  # as far apart as the n-gram is long
