"""The measuring suite, tested on a CPU."""
