"""Adapters of experiment trackers, one file each, imported when a script names them."""
