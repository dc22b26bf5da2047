"""Tests of `benchmarks.alerts`."""
