"""Peers that benchmarks compare jrec with, each in a process of an environment of its own."""
