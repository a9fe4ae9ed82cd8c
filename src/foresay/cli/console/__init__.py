"""The console of `foresay chat`: what is read, what the commands do, what is written."""
