"""Hardware harness: the shared core's plans, executed and timed on real processes."""
