"""User settings as objects: expressions, the names that they may use, and the settings file."""
