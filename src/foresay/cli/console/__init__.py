"""The console of `foresay chat`: reading entries, acting on commands, showing answers."""
