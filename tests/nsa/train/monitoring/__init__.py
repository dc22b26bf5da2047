"""Tests of `nsa.train.monitoring`."""
