"""A GPU that is not there, as NVML would tell of it: `boards` says what it tells, field by field and over time;
`library` is the module in the place of `pynvml`; `process` makes a command of the benches take it for this machine's,
in this process or, by way of the folder `path`, in a new one. Every figure is the CPU's, and its record says so.
"""
