"""Estimates: the disassembly, the bounds, the calibration, the page."""
