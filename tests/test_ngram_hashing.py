"""Published n-gram hashes: the same numbers as their definitions written out, in the loader and in a step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec.nn import NGramConfig, NGramHashing, NGramMemory, compress_tokens, compressed_vocabulary, ngram_rows
from jrec.nn.ngram_hashing import _is_prime, _signed_remainder, _wide_product

QWEN = NGramHashing.preset("qwen3.8-flash-next", pad_id=7)
V41 = NGramHashing.preset("deepseek-v4.1-flash")
DEMO = NGramHashing.preset("engram-demo", vocabulary=99_092)


def int64(number):
    """As a register of 64 bits has it."""
    return (number + 2**63) % 2**64 - 2**63


def written_out(hashing, text, primes, multipliers, ends=()):
    """The rows of each token of one text, by Python's integers: (length, slots)."""
    rows = []
    for i in range(len(text)):
        window, ended = [text[i]], False
        for j in range(i - 1, i - len(multipliers), -1):
            token = text[j] if j >= 0 else hashing.pad_id
            ended = ended or ("absent" in ends and token < 0) or ("pad" in ends and token == hashing.pad_id)
            window.append(hashing.pad_id if ended else token)
        of_token, first = [], 0
        for n in hashing.sizes:
            mixed = 0
            for token, multiplier in zip(window[:n], multipliers[:n], strict=True):
                mixed ^= int64(token * multiplier)
            for head in range(hashing.heads):
                prime = primes[(n - 2) * hashing.heads + head]
                of_token.append(first + int64(mixed) % prime)
                first += prime
        rows.append(of_token if text[i] >= 0 else [-1] * len(of_token))
    return rows


def primes_from(least, count, taken):
    """The next primes by trial division, none of them taken."""
    free = (n for n in itertools.count(least) if n not in taken and all(n % d for d in range(2, int(n**0.5) + 1)))
    found = list(itertools.islice(free, count))
    taken.update(found)
    return found


def both(hashing, tokens, dim=4):
    """The rows by NumPy, which are those of a jitted step."""
    config = NGramConfig.of(hashing, dim=dim)
    rows = ngram_rows(config, tokens)
    assert rows.dtype == np.int32
    on_device = jax.jit(lambda tokens: ngram_rows(config, tokens))(jnp.asarray(tokens))
    np.testing.assert_array_equal(on_device, rows)
    return rows


def test_engram_numbers_are_those_of_its_definition():
    """Section 2.2 and deepseek-ai/Engram: prime sizes over all layers, PCG64 by layer."""
    taken = set()
    layers = {layer: [p for least in (500, 300) for p in primes_from(least, 3, taken)] for layer in (1, 15)}
    tokens = np.random.default_rng(0).integers(0, 400, (3, 20))
    tokens[0, 5] = tokens[1, 0] = -1  # hashed where an n-gram goes over them
    for layer, primes in layers.items():
        hashing = NGramHashing(
            scheme="engram",
            vocabulary=400,
            head_rows=(500, 300),
            heads=3,
            pad_id=2,
            layers=(1, 15),
            layer=layer,
            seed=9,
        )
        draws = np.random.default_rng(9 + 10007 * layer).integers(0, (2**63 - 1) // 400 // 2, 3, np.int64)
        multipliers = [2 * int(draw) + 1 for draw in draws]
        assert hashing.primes == tuple(primes)
        assert hashing.multipliers == tuple(multipliers)
        rows = both(hashing, tokens)
        for text, found in zip(tokens.tolist(), rows.tolist(), strict=True):
            assert found == written_out(hashing, text, primes, multipliers)
        assert hashing.rows == sum(primes) > rows.max()


def test_n_grams_of_deepseek_end_at_absent_tokens():
    hashing = NGramHashing(scheme="deepseek-v4.1", vocabulary=50, head_rows=(100, 90, 80), heads=2, pad_id=3)
    tokens = np.random.default_rng(1).integers(0, 50, (4, 15))
    tokens[np.random.default_rng(2).random(tokens.shape) < 0.2] = -1
    for text, rows in zip(tokens.tolist(), both(hashing, tokens).tolist(), strict=True):
        assert rows == written_out(hashing, text, hashing.primes, hashing.multipliers, ends=("absent",))


def test_n_grams_of_qwen_end_with_their_text():
    hashing = NGramHashing(
        scheme="qwen-ple", vocabulary=50, head_rows=(100, 100), heads=2, pad_id=3, layers=(2, 9), layer=9
    )
    tokens = np.random.default_rng(1).integers(0, 12, (4, 30))
    assert (tokens == 3).any()
    for text, rows in zip(tokens.tolist(), both(hashing, tokens).tolist(), strict=True):
        assert rows == written_out(hashing, text, hashing.primes, hashing.multipliers, ends=("pad", "absent"))


def test_maxtext_has_multipliers_of_32_bits():
    hashing = NGramHashing(scheme="maxtext", vocabulary=1_000, head_rows=(500,), heads=2, pad_id=0, seed=4)
    draws = np.random.default_rng(4).integers(low=0, high=(2**31 - 1) // 1_000 // 2, size=(2,), dtype=np.int32)
    assert hashing.multipliers == tuple((draws * 2 + 1).tolist())
    tokens = np.random.default_rng(5).integers(0, 1_000, (2, 9))
    for text, rows in zip(tokens.tolist(), both(hashing, tokens).tolist(), strict=True):
        assert rows == written_out(hashing, text, hashing.primes, hashing.multipliers)


def test_published_models_have_their_published_numbers():
    primes = (646403, 646411, 646421, 646423, 646433, 646453, 646519, 646523)
    assert DEMO.primes == (*primes, 646537, 646543, 646549, 646571, 646573, 646577, 646609, 646619)
    assert [NGramHashing.preset("deepseek-v4.1-flash", layer=n).rows for n in (1, 14)] == [384_006_168, 384_016_682]
    assert QWEN.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert sum(QWEN.primes) == 320_001_446
    assert QWEN.rows == 320_001_536  # 128 tensors of 2,500,012 rows
    assert (QWEN.slots, QWEN.sizes, V41.slots, V41.sizes) == (16, (2, 3), 24, (2, 3, 4))


GOLDEN = {  # the first and the last two slots of the first and the last token
    "jrec": (
        NGramConfig(rows=70_000, dim=4, sizes=(1, 2, 3), heads=2, seed=5),
        [[2201, 21096, 57947, 60106], [2030, 17834, 48093, 65428]],
    ),
    "engram": (
        NGramConfig.of(DEMO, dim=4),
        [[105775, 1223626, 9609007, 9953549], [317039, 1017162, 9199307, 10081158]],
    ),
    "maxtext": (
        NGramConfig.of(NGramHashing.preset("engram-demo", scheme="maxtext", vocabulary=99_092), dim=4),
        [[23681, 670084, 9064367, 9710976], [41816, 688219, 9468859, 10115468]],
    ),
    "deepseek-v4.1": (
        NGramConfig.of(NGramHashing.preset("deepseek-v4.1-flash", layer=14), dim=4),
        [[166974, 28777537, 356189260, 375070595], [10861823, 24454013, 361266703, 380158200]],
    ),
    "qwen-ple": (
        NGramConfig.of(NGramHashing.preset("qwen3.8-flash-next", pad_id=3), dim=4),
        [[4060287, 25126067, 285049680, 301787730], [8895301, 39685966, 297814680, 314051737]],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_stay_what_they_are(name):
    """A row that moved would read another n-gram's vector of an old checkpoint."""
    config, wanted = GOLDEN[name]
    tokens = np.array([[17, 4, 33, 3, 9]])
    np.testing.assert_array_equal(ngram_rows(config, tokens)[0][[0, 4]][:, [0, 1, -2, -1]], wanted)


@given(data=st.data())
def test_products_and_remainders_of_64_bits_come_from_32(data):
    """Of any token, and of multipliers whose products pass 2^63 and wrap."""
    count = data.draw(st.integers(1, 4))
    tokens = np.array([data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3))], np.int32)
    multipliers = [data.draw(st.integers(0, 2**63 - 1)) for _ in range(2)]
    primes = [data.draw(st.sampled_from([2, 3, 101, 646403, 20_000_003, 2**31 - 1])) for _ in range(count)]
    mixed, halves = np.zeros_like(tokens, np.int64), (0, 0)
    for multiplier in multipliers:
        product = tokens.astype(np.int64) * np.int64(multiplier)
        high, low = _wide_product(jnp.asarray(tokens), multiplier)
        joined = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(np.uint64)
        np.testing.assert_array_equal(joined, product.view(np.uint64))
        mixed, halves = mixed ^ product, (high ^ halves[0], low ^ halves[1])
    rest = _signed_remainder(*halves, primes)
    np.testing.assert_array_equal(rest, mixed[:, :, None] % np.array(primes))


@settings(max_examples=25)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    heads=st.integers(1, 3),
    head_rows=st.lists(st.sampled_from([2, 90, 646_400, 20_000_000]), min_size=1, max_size=3),
    scheme=st.sampled_from(["engram", "deepseek-v4.1", "maxtext", "qwen-ple"]),
    seed=st.integers(0, 2**32),
)
def test_loader_and_step_number_alike(shape, heads, head_rows, scheme, seed):
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.choice([2, 60, 99_092]))
    hashing = NGramHashing(
        scheme=scheme, vocabulary=vocabulary, head_rows=tuple(head_rows), heads=heads, pad_id=1, layers=(3, 8), layer=8,
        seed=seed,
    )  # fmt: skip
    tokens = rng.integers(-1, vocabulary, shape)
    rows = both(hashing, tokens)
    assert rows.shape == (*shape, hashing.slots)
    starts = np.array(hashing.offsets)
    within = (rows >= starts) & (rows < starts + np.array(hashing.primes))
    np.testing.assert_array_equal(within, np.broadcast_to((tokens >= 0)[:, :, None], rows.shape))


def test_primes():
    sieve = np.ones(20_000, bool)
    sieve[:2] = False
    for n in range(2, 142):
        sieve[n * n :: n] = False
    assert [n for n in range(20_000) if _is_prime(n)] == np.flatnonzero(sieve).tolist()
    assert _is_prime(2**31 - 1)
    assert not any(map(_is_prime, (2**31 - 3, 25_326_001, 1_373_653)))  # strong pseudoprimes


TEXTS = [
    "the",
    " The",
    "THE\n",
    "Café",
    "cafe",
    " ",
    "\t\n",
    "",
    "\u03a3\u0391\u03a3",
    "\u03c3\u03b1\u03c2",
    "\u03c3\u03b1\u03c3",
    "ﬁ",
    "fi",
    "\u0301",
    "x\x1c",
    "a  b",
    "a b",
    "\u0915\u093f",
    "\u0915",
]


def test_tokens_that_read_alike_share_a_number():
    numbers = compressed_vocabulary(TEXTS).tolist()
    of_text = dict(zip(TEXTS, numbers, strict=True))
    assert of_text["the"] == of_text[" The"] == of_text["THE\n"] == 0
    assert of_text["Café"] == of_text["cafe"]
    assert of_text[" "] == of_text["\t\n"] != of_text[""]
    # The tokenizer's library lowers single characters: no other sigma at the end of a word.
    assert of_text["\u03a3\u0391\u03a3"] == of_text["\u03c3\u03b1\u03c3"] != of_text["\u03c3\u03b1\u03c2"]
    assert of_text["ﬁ"] == of_text["fi"]
    assert of_text["a  b"] == of_text["a b"]
    assert of_text["\u0915\u093f"] == of_text["\u0915"]  # a vowel of Devanagari is a mark
    assert len({of_text[text] for text in ("", "\u0301", "x\x1c")}) == 3  # an accent alone stands for itself
    assert list(dict.fromkeys(numbers)) == list(range(max(numbers) + 1))  # in the order in which they first appear


def test_tokens_of_parts_of_characters_are_told_apart_by_their_pieces():
    texts = ["\ufffd", "\ufffd", "a"]
    assert compressed_vocabulary(texts, ["Ġx", "ðŁ", "a"]).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"token 0 decodes to .* give the pieces, too"):
        compressed_vocabulary(texts)
    with pytest.raises(ValueError, match="there are 3 texts, but 1 pieces"):
        compressed_vocabulary(texts, ["a"])


def test_compressed_tokens_keep_absent_ones():
    lookup = compressed_vocabulary(["a", "b", "A", "c"])
    tokens = np.array([[3, -1, 2], [1, 0, -5]])
    wanted = [[2, -1, 0], [1, 0, -5]]
    assert compress_tokens(lookup, tokens).tolist() == wanted
    on_device = jax.jit(lambda tokens: compress_tokens(lookup, tokens))(jnp.asarray(tokens))
    assert on_device.tolist() == wanted
    assert on_device.dtype == compress_tokens(lookup, tokens).dtype == np.int32


def test_bad_hashings():
    good = {"scheme": "engram", "vocabulary": 50, "head_rows": (90,), "heads": 2, "pad_id": 0}
    for change, message in (
        ({"scheme": "md5"}, "scheme='md5' is unknown; choose one of engram, deepseek-v4.1, maxtext, qwen-ple"),
        ({"layer": 3}, r"layer=3 must be one of layers=\(0,\)"),
        ({"layers": (0, 0)}, "each of which is there once"),
        ({"pad_id": 50}, "pad_id=50 must be a token of vocabulary=50"),
        ({"heads": 0}, "heads=0"),
        ({"head_rows": ()}, "must be at least 2 for each n"),
        ({"head_rows": (2**31,)}, "must have below 2"),
        ({"head_rows": (2**30, 2**30)}, "must have below 2"),
    ):
        with pytest.raises(ValueError, match=message):
            NGramHashing(**good | change)
    with pytest.raises(ValueError, match="there is no preset 'gpt'; choose one of engram-demo"):
        NGramHashing.preset("gpt")
    with pytest.raises(ValueError, match=r"preset .qwen3\.8-flash-next. does not say pad_id; give it"):
        NGramHashing.preset("qwen3.8-flash-next")
    with pytest.raises(ValueError, match=r"must be those of the hashing, 198, .*NGramConfig\.of"):
        NGramConfig(rows=200, dim=4, sizes=(2,), heads=2, hashing=NGramHashing(**good))
    with pytest.raises(ValueError, match="choose 'sigmoid' or 'signed_sqrt'"):
        NGramMemory(NGramConfig(rows=200, dim=4), 8, gate="root", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("gate", ["sigmoid", "signed_sqrt"])
def test_the_gate_written_out(gate):
    """DeepSeek's demo with one branch: signed root, and biases of keys and values."""
    config = NGramConfig(rows=100, dim=3, sizes=(2,), heads=2)
    memory = NGramMemory(config, 8, gate=gate, use_bias=gate == "signed_sqrt", rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    hidden, rows = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 9, 8), (2, 9, 2, 3)))
    hidden[0, 0] = 0  # no agreement at all: a gate of half, and finite gradients
    if gate == "signed_sqrt":
        memory.key.bias[...], memory.value.bias[...] = (jnp.asarray(rng.normal(size=8), jnp.float32) for _ in range(2))
    flat = rows.reshape(2, 9, 6)
    key, value = (flat @ np.asarray(layer.kernel[...]) for layer in (memory.key, memory.value))
    if gate == "signed_sqrt":
        key, value = key + np.asarray(memory.key.bias[...]), value + np.asarray(memory.value.bias[...])

    def normed(x):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)

    agreement = (normed(hidden) * normed(key)).sum(axis=-1, keepdims=True) / np.sqrt(8)
    if gate == "signed_sqrt":
        agreement = np.sign(agreement) * np.sqrt(np.maximum(np.abs(agreement), 1e-6))
    np.testing.assert_allclose(memory(hidden, rows), value / (1 + np.exp(-agreement)), rtol=2e-5, atol=2e-6)
    gradients = jax.grad(lambda hidden: memory(hidden, jnp.asarray(rows)).sum())(jnp.asarray(hidden))
    assert np.isfinite(gradients).all()
