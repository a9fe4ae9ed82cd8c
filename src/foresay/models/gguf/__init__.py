"""GGUF files: header, values, shapes and weights."""
