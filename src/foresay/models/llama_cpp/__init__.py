"""llama.cpp under foresay's loop: its kernels and its quantised files, with whatever drafter needs no hidden states."""
