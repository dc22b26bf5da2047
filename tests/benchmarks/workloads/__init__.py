"""Tests of `benchmarks.workloads`."""
