"""From sessions to what may be counted: who is a unit, what is measured on a turn, and the evidence that a decision is made from."""
