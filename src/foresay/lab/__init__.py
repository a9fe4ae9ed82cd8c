"""The lab: data sets, recording, replay, profiles, benchmarks, tuning and reports."""
