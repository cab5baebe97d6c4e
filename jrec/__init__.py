"""Deep recommendation models with huge embedding tables, trained in JAX."""
