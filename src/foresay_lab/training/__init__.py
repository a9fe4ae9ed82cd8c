"""Training of drafts: n-gram tables, pruning, distillation, heads."""
