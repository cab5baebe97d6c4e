"""How do I train a DLRM on a DataFrame? Texts as users and items, a list column, floats; scores of another frame.

Here it is an Arrow table; frames of pandas and polars are taken as they are.

python examples/dlrm_dataframe.py
"""

import numpy as np
import optax
import pyarrow as pa
from flax import nnx

import jrec

BATCH = 256


def log_of_clicks(examples: int, seed: int) -> pa.Table:
    """A log in which some users like some genres and nobody likes a high price."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 500, examples), rng.zipf(1.5, examples) % 1000
    price = rng.normal(size=examples)
    liking = np.where(user % 5 == item % 5, 1.5, -1.0) - price
    return pa.table(
        {
            "user": [f"user-{u}" for u in user],
            "item": [f"item-{i}" for i in item],
            "genres": [[int(i % 5), int(i % 7)] for i in item],
            "price": price,
            "clicked": (rng.logistic(size=examples) < liking).astype(np.float32),
        }
    )


def main(examples: int = 40_000) -> dict[str, float]:
    """Trains one epoch; returns log losses (nats an example) of later clicks: the model's, and a constant's."""
    frame, later = log_of_clicks(examples, seed=0), log_of_clicks(4_000, seed=1)
    tables = [
        jrec.TableConfig(name="user", rows=4_096, dim=16),  # a text takes the row of its hash
        jrec.TableConfig(name="item", rows=8_192, dim=16),
        jrec.TableConfig(name="genre", rows=7, dim=16),
    ]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="item", table="item"),
        jrec.FeatureConfig(name="genres", table="genre", max_length=2, pooling="mean"),
    ]
    layout = jrec.EmbeddingLayout.build(tables, features)
    config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(32, 16), top_mlp=(32, 1))
    model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    rows = jrec.ops.Adagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)
    columns = {"dense": ["price"], "vocabularies": {"user": "hash", "item": "hash"}}

    with jrec.distribute(model, optimizer) as run:
        step = run.compile()
        batches = (frame.slice(begin, BATCH) for begin in range(0, examples, BATCH))
        for batch in run.feed(batches, label="clicked", **columns):
            loss, _ = step(batch)
            if run.steps % 50 == 0:
                print(f"step {run.steps}: log loss {float(loss):.3f}")
        logits = run.predict(later, batch_size=1_024, **columns)

    clicked = later["clicked"].to_numpy()
    rate = frame["clicked"].to_numpy().mean()
    return {
        "model": float(np.mean(np.logaddexp(0, np.where(clicked, -logits, logits)))),
        "constant": float(-np.mean(np.where(clicked, np.log(rate), np.log(1 - rate)))),
    }


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
