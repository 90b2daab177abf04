"""The command line: one file a subcommand, each imported when it is called."""
