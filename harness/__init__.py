"""Hardware harness: the shared core's plans, executed and timed on real processes.

At the top: the MoE layer (layer.py, dispatchers.py, slot_gate.py), the stack of them (stack.py), ranks (pool.py, worker.py,
torchrun.py) and what runs them (app.py, preflight.py, measure.py, record.py). Below the layer: transport/, kernels/ and their
twins in reference/, device/ (the layer by kernels), models/. Above it: blocks/, serving/, calibration/, bench/.
"""
