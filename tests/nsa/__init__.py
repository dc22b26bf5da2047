"""Units of the package, one file per module."""
