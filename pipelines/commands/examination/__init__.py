"""`ratchet doctor`: what a deployment assumes, each assumption looked at."""
