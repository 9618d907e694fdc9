"""What benches share: load, accounts of what was said, and how a part hands back its bounds."""
