"""The configuration of a small run on a mesh, on synthetic click logs."""

CONFIG = """
seed = 3
max_steps = 6
[data]
batch_size = 64
eval_batch_size = 250
window_blocks = 2
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [1]
[optimizer]
learning_rate = 0.05
[optimizer.embedding]
name = "rowwise_adagrad"
learning_rate = 0.05
[evaluate]
final_splits = ["test"]
[log]
tensorboard = false
"""
