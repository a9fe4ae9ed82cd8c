"""Block drafters: small models that draft a block of tokens in one pass (DFlash, arXiv 2602.06036; DSpark, DeepSpec 2026)."""
