"""The command line: one file a subcommand, each a thin call into the library."""
