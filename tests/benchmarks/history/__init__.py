"""Tests of `benchmarks.history`."""
