"""What this machine's passes cost."""
