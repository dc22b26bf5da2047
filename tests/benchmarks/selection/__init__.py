"""Tests of benchmarks/selection."""
