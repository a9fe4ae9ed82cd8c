"""What drafts are made of: corpora, n-gram tables."""
