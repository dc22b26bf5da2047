"""Tests of `benchmarks.ab`."""
