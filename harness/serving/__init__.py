"""Served runs in real time (serve.py), and the whole tiny model that they may run (full_model.py)."""
