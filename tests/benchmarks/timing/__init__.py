"""Tests of `benchmarks.timing`."""
