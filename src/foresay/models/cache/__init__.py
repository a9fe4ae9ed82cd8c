"""Key-value caches whose slots are absolute positions of each row."""
