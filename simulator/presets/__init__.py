"""Cluster presets from public measurements: `python -m simulator.presets DATA_DIR` (__main__.py)."""
