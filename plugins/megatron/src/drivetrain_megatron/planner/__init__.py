"""Pipeline schedules as data: simulated, searched and drawn before anything runs."""
