"""Triton kernels; each has its twin in `harness.reference`."""
