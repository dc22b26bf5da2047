"""Tests of `benchmarks.report`."""
