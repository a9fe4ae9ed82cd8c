"""Work over many prompts or methods, shared by processes on this machine or by Ray: each task once, whatever dies."""
