"""The house rules that a machine can hold: who imports what, which rooms there are, what starting costs."""
