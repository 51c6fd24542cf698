# make demo    watch a small language model learn by reinforcement (ENGINE=local or vllm)
# make test    lint, types and every capability once (in WORKERS processes)
# make test-all    the same, then all other tests: what CI runs
# make test-versions    SUITES with the oldest versions that are allowed and with the newest
# make docs    the site, in build/site (DOCS_COMMAND=serve shows it at http://127.0.0.1:8000)
# make gpu-check   all that only a GPU can show, in BUDGET=540 seconds; CHECK=tests/gpu/test_heads.py for a part (GPU_PYTHON=python)
# The first two install what they need into .venv first, with Python 3.11 and nothing else.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV ?= .venv
ENGINE ?= local
SEED ?= 0
WORKERS ?= 3
GPU_PYTHON ?= python
CHECK ?=
BUDGET ?= 540
DOCS_COMMAND ?= build
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
SUITES ?= tests/losses tests/models tests/modules tests/datamodules
CPU_INDEX := $(shell sed -n 's/^--extra-index-url //p' requirements/cpu.txt)
TORCH := $(shell sed -n 's/^torch==\(.*\)+cpu$$/\1/p' requirements/cpu.txt)
OLDEST_TORCH := $(shell sed -n 's/^torch==//p' requirements/oldest.txt)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --durations 15
# Whatever needs several processes or long is left out, unless it is the one test that shows a capability.
QUICK := smoke or not (ray or vllm or distributed or slow or long or families)
TEST_TOOLS := pytest pytest-timeout pytest-xdist hypothesis accelerate bitsandbytes

# Torch's build for CPUs into an environment (1) in a version (2): from pip's own sources if they have it, else from the index
# that the lock names. All other packages are installed without that index, which pip would ask for each of them.
define install_torch
$(1)/bin/python $(PIP_INSTALL) --no-deps torch==$(2)+cpu 2>/dev/null \
	|| $(1)/bin/python $(PIP_INSTALL) --no-deps --index-url $(CPU_INDEX) torch==$(2)+cpu
endef

.PHONY: demo docs test test-all quick-tests test-versions lint bench gpu-check install clean

install: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call install_torch,$(VENV),$(TORCH))
	grep -v '^--' requirements/cpu.txt > $(VENV)/packages.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps -r $(VENV)/packages.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

# Apart from all else; without them their test is skipped.
$(VENV)/loggers/.installed: requirements/loggers.txt $(INSTALLED)
	-$(BIN)/python $(PIP_INSTALL) --no-deps --upgrade --target $(@D) -r $< && touch $@

# Without Ray, vLLM and DeepSpeed, whose versions have no room. Torch's oldest build for GPUs is taken where that for CPUs is
# out of reach; it has the same results on a CPU.
.venv-oldest/.installed: requirements/oldest.txt requirements/cpu.txt
	$(PYTHON) -m venv .venv-oldest
	-$(call install_torch,.venv-oldest,$(OLDEST_TORCH))
	.venv-oldest/bin/python $(PIP_INSTALL) -r requirements/oldest.txt $(TEST_TOOLS)
	touch $@

.venv-newest/.installed: setup.cfg requirements/cpu.txt
	$(PYTHON) -m venv .venv-newest
	$(call install_torch,.venv-newest,$(TORCH))
	.venv-newest/bin/python $(PIP_INSTALL) . $(TEST_TOOLS)
	.venv-newest/bin/python -m pip uninstall --quiet --yes rlhfkit
	touch $@

test-versions: .venv-oldest/.installed .venv-newest/.installed
	@for each in oldest newest; do \
		.venv-$$each/bin/python -m pip list 2>/dev/null | grep -E '^(torch|lightning|transformers|datasets|peft) '; \
		PYTHONPATH=$(CURDIR) .venv-$$each/bin/python -m pytest -p no:cacheprovider -n $(WORKERS) $(SUITES) \
			-m "not vllm and not ray and not distributed and not slow and not families" || exit 1; \
	done

demo: $(INSTALLED)
	$(BIN)/rlhfkit demo --engine $(ENGINE) --seed $(SEED)

# Types are checked beside the tests, which wait now and then.
test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs 2 quick-tests lint

quick-tests: $(INSTALLED)
	$(PYTEST) -m "$(QUICK)"

test-all: $(VENV)/loggers/.installed test
	$(PYTEST) -m "not ($(QUICK)) and not families"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m mkdocs $(DOCS_COMMAND)

bench: $(INSTALLED)
	@for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# In the environment that is active, not in ours: ours has a torch without CUDA. A test that hangs or breaks the GPU ends its
# process, in whose place pytest-xdist starts another; no further test is started after BUDGET seconds.
gpu-check:
	RLHFKIT_GPU_DEADLINE=$$(( $$(date +%s) + $(BUDGET) )) $(GPU_PYTHON) -m pytest \
		-m cuda -n 1 --dist worksteal --max-worker-restart 20 -v --timeout 240 $(CHECK)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info runs lightning_logs
