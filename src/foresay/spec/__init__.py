"""What a user writes, made into objects: expressions, the names they know, the settings file."""
