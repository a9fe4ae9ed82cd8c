"""The boundary between token ids and characters."""
