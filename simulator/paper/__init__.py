"""The paper's tables and figures, done again: `make paper` writes results/paper/ (app.py)."""
