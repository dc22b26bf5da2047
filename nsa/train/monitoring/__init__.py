"""Monitoring of a run: asynchronous metrics, attention statistics, alarms, the watchdog."""
