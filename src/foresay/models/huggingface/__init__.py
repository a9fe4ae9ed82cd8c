"""Any transformers model over the slot cache."""
