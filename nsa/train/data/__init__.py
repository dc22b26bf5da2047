"""Training data: text files, packing into batches, the loader of one rank."""
