"""The check that decides where GPU kernels are used: every kernel class, in processes of its own, against float64."""
