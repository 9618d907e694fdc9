"""Practice: tasks, a harness in a box that asks the gateway like any agent, a grade in another box, and who does how many of them when.

Fed by tasksets (`tasksets/`, or yours) and by the book of rollouts; feeds the gateway with episodes (`rollout:<taskset>`) and with what
came of them, which labelling, batching and training take like anybody's. Never an exposure.
"""
