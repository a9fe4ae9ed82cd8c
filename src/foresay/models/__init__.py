"""What scores tokens: transformers models, tables, and where they come from."""
