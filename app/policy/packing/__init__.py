"""Linear layers with their weights laid out once for the processor that multiplies them."""
