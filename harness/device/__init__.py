"""A MoE layer by Triton kernels: its exchange, plan and clock on the device, and the whole layer in a graph (graph.py)."""
