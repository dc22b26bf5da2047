"""Tests of `benchmarks.baselines`."""
