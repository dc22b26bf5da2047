"""The laws of native sparse attention, one file per theme; `test_faults.py` shows that each can fail."""
