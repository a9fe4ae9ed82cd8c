"""Tool calls in generated text: the formats of model families, their parsers and grammars."""
