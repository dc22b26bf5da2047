"""Training the decoder LM: what a run must be before it starts, and what is watched while it runs."""
