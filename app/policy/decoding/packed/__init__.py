"""The forward pass of decoders whose products are packed: what lies between those, compiled."""
