"""Use of foresay in other libraries."""
