"""The words of learning: rewards and labels, batches, updates, cycles, rollouts and the boxes that they run in."""
