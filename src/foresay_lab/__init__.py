"""The lab: record, replay, profile, simulate, tune, bench, report; training; workers. Imports foresay, which never imports it."""
