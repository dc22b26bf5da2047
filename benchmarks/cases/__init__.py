"""What every folder of the benches speaks of: a case by its key, its inputs, the work to time, and how it ended."""
