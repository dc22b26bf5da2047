"""Tests of `nsa.tuner`."""
