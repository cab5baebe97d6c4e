"""Runs: a model's state over devices and host memory, its batches, and its step. Knows no configuration file."""
