"""The atlas: what a trained model selects."""
