"""Transformer blocks of any model's shape around the real MoE layers: scope=full_model on fixed batches (stack.py)."""
