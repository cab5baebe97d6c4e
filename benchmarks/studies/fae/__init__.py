"""FAE's calibrator beside the paper's: figures, a table of estimates, and what calibrating and packing cost."""
