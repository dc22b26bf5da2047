"""Tests of `nsa.warm`."""
