"""Data sets, their prompts, and the requests built from them."""
