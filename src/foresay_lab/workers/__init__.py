"""Distribution of tasks over worker processes or a Ray cluster; each task yields one result even if workers die."""
