"""Alerts: one per cause of a slowdown, opened from the records, confirmed by a paired re-run, closed by its end."""
