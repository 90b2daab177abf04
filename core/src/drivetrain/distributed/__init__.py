"""What processes have in common: process group, collectives, random numbers, devices."""
