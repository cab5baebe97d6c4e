"""The shipped configuration of a TBSM, and what makes its run a small one."""

import pathlib

SHIPPED = pathlib.Path(__file__).parents[1] / "configs" / "tbsm_taobao.toml"


SMALL = (
    "data.batch_size=200", "data.eval_batch_size=400", "data.workers=0", "evaluate.every_steps=0", "log.every_steps=4",
    "log.tensorboard=false", "model.embedding_dim=4", "model.bottom_mlp=[4]", "model.tbsm.tower_mlp=[8,7]",
    "model.tbsm.attention_mlp=[6]", "model.top_mlp=[12,1]", "optimizer.name='adam'", "optimizer.learning_rate=0.01",
)  # fmt: skip
