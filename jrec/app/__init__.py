"""Training: configuration, the loop, metrics, checkpoints and reports."""
