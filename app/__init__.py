"""Where the loop touches the world: everything that runs because a request came, and what both halves share."""
