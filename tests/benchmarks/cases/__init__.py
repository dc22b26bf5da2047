"""Tests of `benchmarks.cases`."""
