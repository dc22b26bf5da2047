"""What is measured, against what, and how: `python -m benchmarks run`, `python -m benchmarks report`."""
