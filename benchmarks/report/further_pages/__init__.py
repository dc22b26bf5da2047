"""Further pages of the report: what is proven where, atlas, estimates, several GPUs, calibration, incidents."""
