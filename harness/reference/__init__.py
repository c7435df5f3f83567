"""The operations of the harness in plain torch: what kernels are held to, and what CPU runs time."""
