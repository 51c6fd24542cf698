# make demo    watch a small language model learn by reinforcement (ENGINE=local or vllm)
# make test    lint, types and all tests (in WORKERS processes)
# make gpu-check   all that only a GPU can show, in 9 minutes; CHECK="--only losses" for a part (GPU_PYTHON=python)
# The first two install what they need into .venv first, with Python 3.11 and nothing else.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV ?= .venv
ENGINE ?= local
SEED ?= 0
WORKERS ?= 2
GPU_PYTHON ?= python
CHECK ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench gpu-check install clean

install: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(INSTALLED)
	$(BIN)/python tutorials/grpo_arithmetic.py --engine $(ENGINE) --seed $(SEED)

test: lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	@for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# In the environment that is active, not in ours: ours has a torch without CUDA.
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check --output runs/gpu-check $(CHECK)

clean:
	rm -rf $(VENV) build dist *.egg-info runs lightning_logs
