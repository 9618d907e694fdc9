"""The cells of `make bench-gates`: simulated people and the production statistics over them."""
