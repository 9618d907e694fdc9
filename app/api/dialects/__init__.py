"""Other systems' feedback formats, one file each: thin translators to Observation.

Fed by their clients / feeds the door.
"""
