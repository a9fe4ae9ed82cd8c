"""The draft head for SmolLM2-135M-Instruct, as files in the folder `head`; there is no code in this package."""
