"""foresay inside other libraries."""
