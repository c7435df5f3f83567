"""Calibration: single operations of this machine, timed (collect.py), fitted (fit.py) and judged: a cluster file."""
