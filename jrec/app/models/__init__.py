"""Kinds of models: what each trains, predicts, exports and reports; one file a kind, found by its name."""
