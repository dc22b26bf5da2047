"""First contact with a machine: its checks, its first records, and the bundle in which they travel."""
