"""Draft heads: draft models of one layer that read the target's hidden states (EAGLE-3, Li et al. 2025)."""
