"""How fast the kernels may be on GPUs that nobody has measured: instructions, bytes, and a calibration on Hopper."""
