"""The exact step and what it speaks in: rows, laws, proposals, rules, one pass. Knows no model class, no text and no request."""
