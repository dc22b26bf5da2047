"""Laws that every backend obeys, and units; laid out like what they test."""
