"""From text to the batches of one rank."""
