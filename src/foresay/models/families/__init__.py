"""Families of models: one file for those of one kind, each with all that is known of it; table.py finds them by their names."""
