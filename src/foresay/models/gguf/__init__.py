"""GGUF files: header, values, shapes, tokenizer and weights."""
