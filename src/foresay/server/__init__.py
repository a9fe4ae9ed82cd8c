"""The engine behind HTTP, in the shape that OpenAI's clients speak."""
