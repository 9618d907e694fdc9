"""What breaks in the fault benches, and how what came of it is judged."""
