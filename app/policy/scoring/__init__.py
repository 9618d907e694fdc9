"""Log-probabilities of tokens that are there already: packed rows for training, evaluation and the probe of foreign engines."""
