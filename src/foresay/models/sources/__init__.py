"""A name, folder, hub id or GGUF file, made into weights and a tokenizer."""
