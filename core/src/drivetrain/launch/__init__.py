"""Starting processes, and reading in each process what a launcher put into its environment."""
