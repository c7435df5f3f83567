# Two commands: `make demo` (the main job, end to end) and `make test` (lint, types, tests). Both make .venv themselves.
PYTHON ?= python3
VENV ?= .venv
# Point pip at another wheel index, e.g. make demo PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
# Processes that run the tests, a file at a time
TEST_WORKERS ?= 2
BIN = $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo paper test lint types unit validate bench bench-gpu calibrate accuracy whole-model rank-order micro skew shuffle clean

demo: $(VENV)/installed
	$(BIN)/semmoe trace record tiny --requests 320 --out results/runs/demo-trace/routes.npz
	$(BIN)/semmoe calibrate
	$(BIN)/semmoe simulate experiment=demo
	$(BIN)/semmoe measure experiment=demo
	$(BIN)/semmoe simulate experiment=demo_serve
	$(BIN)/semmoe measure experiment=demo_serve
	$(BIN)/semmoe simulate experiment=demo_serve replay=results/runs/demo
	$(BIN)/semmoe compare results/runs/demo results/runs/demo/replay

# The paper's tables and figures again, into results/paper/
paper: $(VENV)/installed
	$(BIN)/python -m simulator.paper

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
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

# The accuracy table on public measurements (../shared/data/perfdata); fails on a regression, warns of a drift
validate: $(VENV)/installed
	$(BIN)/semmoe validate

bench: $(VENV)/installed
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-only

# Checks, times and writes results/gpu.jsonl on one GPU with virtual ranks; GPU_ARGS=--dry-run checks on a CPU
bench-gpu: $(VENV)/installed
	$(BIN)/python -m harness.bench.gpu $(GPU_ARGS)

calibrate: $(VENV)/installed
	$(BIN)/semmoe calibrate

# Predicts held-out configurations of 2 and 4 ranks from a fresh calibration of each, measures them, writes results/accuracy.md
ACCURACY_ARGS ?= measure.calibration=thorough
accuracy: $(VENV)/installed
	rm -rf results/runs/accuracy
	set -e; for ranks in 2 4; do \
	  of="cluster.file=results/runs/accuracy/cluster-$$ranks.yaml cluster.ranks_per_node=$$ranks $(ACCURACY_ARGS)"; \
	  $(BIN)/semmoe calibrate $$of; \
	  $(BIN)/semmoe measure experiment=accuracy $$of; \
	  $(BIN)/semmoe simulate experiment=accuracy $$of; \
	  $(BIN)/semmoe measure experiment=accuracy_serve $$of; \
	  $(BIN)/semmoe simulate experiment=accuracy_serve $$of; \
	  $(BIN)/semmoe simulate experiment=accuracy_serve replay=results/runs/accuracy $$of; \
	done
	$(BIN)/python -m semmoe.accuracy results/runs/accuracy results/runs/accuracy/replay

# Attention, layers and steps of whole models on 2 and 4 ranks, predicted from fresh calibrations: results/whole_model.md
WHOLE_RUNS = results/runs/whole_model
WHOLE_ARGS ?= measure.calibration=thorough
WHOLE_TINY = model=tiny
WHOLE_V2_LITE = model=deepseek-v2-lite model_scale=.1 trace=synthetic
whole-model: $(VENV)/installed
	rm -rf $(WHOLE_RUNS)
	set -e; for ranks in 2 4; do for model in "$(WHOLE_TINY)" "$(WHOLE_V2_LITE)"; do \
	  file=$(WHOLE_RUNS)/cluster-$$ranks-$$(echo "$$model" | sed 's/model=//; s/ .*//').yaml; \
	  of="$$model ep_size=$$ranks cluster.ranks_per_node=$$ranks cluster.file=$$file $(WHOLE_ARGS)"; \
	  $(BIN)/semmoe calibrate $$of; \
	  $(BIN)/semmoe measure experiment=whole_model $$of; \
	  $(BIN)/semmoe simulate experiment=whole_model $$of; \
	done; done
	$(BIN)/python -m semmoe.whole_model $(WHOLE_RUNS)

# Ten policies measured and simulated: does the simulator put them in the measured order? results/rank_order.md
RANK_ORDER = experiment=rank_order cluster.file=results/runs/rank_order/cluster.yaml
rank-order: $(VENV)/installed
	rm -rf results/runs/rank_order
	$(BIN)/semmoe calibrate $(RANK_ORDER) sweep=[]
	$(BIN)/semmoe measure $(RANK_ORDER)
	$(BIN)/semmoe simulate $(RANK_ORDER)
	$(BIN)/python -m semmoe.rank_order results/runs/rank_order

# The paper's micro-benchmark, simulated on 8 H100 and 8 L40S and in both backends on this machine: results/micro.md
MICRO_RATES = trace.local_rate=0.2,0.4,0.6,0.8,0.9
micro: $(VENV)/installed
	rm -rf results/runs/micro
	$(BIN)/semmoe simulate -m experiment=micro model=qwen3-30b-a3b cluster=h100x8,l40sx8 ep_size=8 $(MICRO_RATES)
	$(BIN)/semmoe calibrate cluster.file=results/runs/micro/cluster.yaml
	$(BIN)/semmoe measure -m experiment=micro cluster.file=results/runs/micro/cluster.yaml
	$(BIN)/semmoe simulate -m experiment=micro cluster.file=results/runs/micro/cluster.yaml
	$(BIN)/python -m harness.bench.ranking --out results/runs/micro/token_ranking.jsonl
	$(BIN)/python -m semmoe.micro results/runs/micro

# Skewed all-to-all by bytes, pattern and skew, on 2 and 4 CPU ranks or all GPUs; raw samples beside it: results/skew.md
skew: $(VENV)/installed
	$(BIN)/python -m harness.bench.skew $(SKEW_ARGS)

# SRS, SAG, exchange and token ranking on 4 CPU ranks against gloo and torch: results/shuffle.md
shuffle: $(VENV)/installed
	$(BIN)/python -m harness.bench.shuffle

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache results/runs
