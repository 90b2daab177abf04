"""Starts worker processes, and reads a launcher's environment variables in each process."""
