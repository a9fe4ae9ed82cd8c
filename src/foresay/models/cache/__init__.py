"""Keys and values of each row, in slots at absolute positions."""
