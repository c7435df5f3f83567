"""Benchmarks of kernels and exchanges, each a command with its page or rows in results/: gpu, shuffle, ranking, skew."""
