"""The llama.cpp backend: its kernels and quantized files, with every drafter that needs no hidden states of the target."""
