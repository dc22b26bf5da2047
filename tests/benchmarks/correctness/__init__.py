"""Tests of `benchmarks.correctness`."""
