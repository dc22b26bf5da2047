"""Attention over several ranks, timed against one of them."""
