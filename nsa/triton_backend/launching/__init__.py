"""How kernels are started again and side by side: what a call costs the host, and what a CUDA graph may overlap.

`relaunch` finds a compiled kernel past Triton's lookup; `recording` makes a `plan` of what one call launches, and
`plans` keeps it for calls like it; `lanes` says which launches need not wait for one another.
"""
