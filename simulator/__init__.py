"""Discrete-event simulator: the shared core's plans and traffic, timed by a cost model."""
