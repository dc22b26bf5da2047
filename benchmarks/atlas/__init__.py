"""The atlas: what a trained model selects on held-out text, and whether it answers as well as its dense twin."""
