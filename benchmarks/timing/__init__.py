"""How long a call takes and how much memory it needs, and what the device can reach at most."""
