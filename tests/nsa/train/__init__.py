"""Units of the training system, one file per module."""
