"""Passes of Llama-like decoders on a GPU: keys and values in pages, flat lists of tokens, kernels in Triton."""
