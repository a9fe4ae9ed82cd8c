"""Reports of benchmark results: a table, figures and a page."""
