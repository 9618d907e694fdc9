"""A deployment on this machine: its preparation, its processes, and what the loop is plugged into."""
