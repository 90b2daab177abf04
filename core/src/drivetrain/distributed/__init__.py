"""Process group, collectives, random number generators and devices of the processes of a job."""
