"""Tests of `nsa.train.data`."""
