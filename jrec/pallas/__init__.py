"""GPU kernels on Pallas' Mosaic GPU backend. They know arrays, never tables, layouts or models."""
