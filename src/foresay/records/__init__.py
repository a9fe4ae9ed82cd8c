"""Files that outlive a run: recordings, profiles, results, and their provenance."""
