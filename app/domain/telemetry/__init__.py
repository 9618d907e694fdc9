"""The words of what is served and said: turns, observations, events, the streams they travel in, and what an engine is asked."""
