"""What offline suites conclude: two versions on the same tasks, and many candidates against one suite."""
