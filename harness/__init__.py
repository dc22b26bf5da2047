"""What both suites stand on: the machines by name, the fingerprint of a figure, checked JSON, and a guarded child."""
