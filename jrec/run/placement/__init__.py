"""Where a run's rows live: its mesh and plan, a tier for each stack, and rows of host memory between processes."""
