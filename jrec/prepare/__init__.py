"""The workshop: raw logs to datasets. Knows no model and no configuration."""
