"""One store per tier: how rows are looked up and updated where they live (``jrec.tiers.store``)."""
