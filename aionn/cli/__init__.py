"""The command line: in ``commands`` one file a subcommand, each a thin call into the library."""
