# Two commands: `make demo` (the main job, end to end) and `make test` (lint, types, tests). Both make .venv themselves.
PYTHON ?= python3
VENV ?= .venv
# Point pip at another wheel index, e.g. make demo PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
BIN = $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types unit bench bench-gpu calibrate clean

demo: $(VENV)/installed
	$(BIN)/semmoe trace record tiny --requests 320 --out results/runs/demo-trace/routes.npz
	$(BIN)/semmoe calibrate
	$(BIN)/semmoe simulate experiment=demo
	$(BIN)/semmoe measure experiment=demo
	$(BIN)/semmoe simulate experiment=demo_serve
	$(BIN)/semmoe measure experiment=demo_serve
	$(BIN)/semmoe simulate experiment=demo_serve replay=results/runs/demo
	$(BIN)/semmoe compare results/runs/demo results/runs/demo/replay

test: $(VENV)/installed lint types unit

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit('semmoe needs Python 3.11 or newer, this is ' + sys.version) if sys.version_info < (3, 11) else 0"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -q -c constraints.txt -e ".[dev]"
	touch $@

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/python -m pytest

bench: $(VENV)/installed
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-only

# Checks, times and writes results/gpu.jsonl on one GPU with virtual ranks; GPU_ARGS=--dry-run checks on a CPU
bench-gpu: $(VENV)/installed
	$(BIN)/python -m harness.bench_gpu $(GPU_ARGS)

calibrate: $(VENV)/installed
	$(BIN)/semmoe calibrate

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache results/runs
