"""Accuracy of the cost model on public measurements that it was not fitted to; `simulator/validate.py` runs it."""
