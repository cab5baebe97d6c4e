"""What the five papers claim, and where jrec's figures lie; ``benchmarks.results`` makes docs/results.md of them."""
