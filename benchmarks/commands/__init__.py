"""The subcommands. Each module has `SUMMARY`, `add_arguments(parser)` and `main(arguments) -> int`, the exit code."""
