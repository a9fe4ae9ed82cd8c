"""The lab: data, recording, replaying, profiling, benchmarking, tuning, reporting."""
