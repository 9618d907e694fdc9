"""A deployment of replicas as an operator would run it, for the benches that upgrade it, break it and cut it off under load."""
