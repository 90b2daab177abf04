"""The command line: one file per subcommand, imported when it is called."""
