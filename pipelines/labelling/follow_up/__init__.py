"""What the user's next message says about the answer before it: satisfied, dissatisfied, refinement or neutral.

Fed by `follow_up` observations / feeds the term of that name with a calibrated satisfaction in [-1, 1], or an abstention.
"""
