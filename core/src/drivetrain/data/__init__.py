"""Plans which rank reads which sample, and the data loaders that follow the plans."""
