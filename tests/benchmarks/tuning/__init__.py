"""Tests of `benchmarks.tuning`."""
