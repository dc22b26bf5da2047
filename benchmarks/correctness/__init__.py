"""What a figure is held to, in float64: oracle, second implementation, tolerances, and what a call could fake."""
