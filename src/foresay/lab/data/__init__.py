"""Data sets, their prompts, and the requests made of them."""
