"""Results as a table, figures and a page."""
