"""The incidents, one per file: the fault as it was shipped, its detector, and the same detector on the product."""
