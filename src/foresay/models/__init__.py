"""LanguageModels: transformers models, tables and recordings, and how models are found and loaded."""
