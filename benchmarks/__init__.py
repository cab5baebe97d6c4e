"""Benchmarks: ``python -m benchmarks.NAME``; each prints JSON lines on stdout and a table on stderr."""
