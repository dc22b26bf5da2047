"""`python -m nsa.warm`: kernels compiled before anybody needs them, into Triton's cache."""
