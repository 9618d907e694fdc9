"""What versions are made of and where they lie: named tensors and their digest, snapshots as folders, deltas
between them, on a disk or any storage."""
