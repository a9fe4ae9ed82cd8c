"""Files that outlive a run: recordings, profiles, results, and where they came from."""
