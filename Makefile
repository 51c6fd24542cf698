# make demo    watch a small language model learn by reinforcement (ENGINE=local or vllm)
# make test    lint, types and all tests (in WORKERS processes)
# Both install what they need into .venv first, with Python 3.11 and nothing else.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV ?= .venv
ENGINE ?= local
SEED ?= 0
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench install clean

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

clean:
	rm -rf $(VENV) build dist *.egg-info runs lightning_logs
