"""What is watched while a run goes on: metrics without waiting, attention, alarms, a deadline."""
