"""Tests of `benchmarks.traces`."""
