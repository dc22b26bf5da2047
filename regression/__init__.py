"""Every incident of the field, reproduced, caught, and shown to be gone: `python -m regression list | run`."""
