"""`tune`: which launch parameters of the Triton kernels are the fastest on this GPU."""
