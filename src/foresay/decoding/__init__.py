"""The exact decoding step: rows, distributions, proposals, acceptance rules. Knows no model class, no text and no request."""
