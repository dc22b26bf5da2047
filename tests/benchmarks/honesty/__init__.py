"""Tests that a figure is what it says: outcomes, pages, what is timed, and the cheats that were tried."""
