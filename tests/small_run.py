"""The configuration of a run that is done in a moment, for tests of what stands around training."""

CONFIG = """
[data]
batch_size = 64
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [1]
[log]
tensorboard = false
progress = "off"
"""
