"""Pages of their own: what is proven where, atlas, estimates, several GPUs, calibration, incidents."""
