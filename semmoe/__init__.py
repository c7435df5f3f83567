"""semmoe: plan, simulate, measure and compare semantic parallelism for MoE inference.

Shape letters used in names throughout the project:
T tokens, L MoE layers, E experts, k choices per token, G ranks, P expert slots, R requests, V vocabulary, H hidden,
U distinct token ids seen while profiling.
"""

__version__ = "0.1.0"
