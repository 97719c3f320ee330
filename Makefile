# make demo   set up, then train a tiny model with GRPO while a rank is killed 
# make test   set up, then lint, types, tests
# make manual set up, then the manual as a site, in build/manual
#
# PYTHON=python3.12   interpreter to build on (default: the first of 3.11 to 3.13 that is found)
# VENV=               empty: no virtual environment, use PYTHON itself

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)

ifeq ($(strip $(PYTHON)),)
$(error everstep needs Python 3.11 to 3.13 on the PATH; install it, or say where it is: make PYTHON=/path/to/python3)
endif

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STAMP := build/setup$(subst /,-,$(PYTHON)).stamp
else
PY := $(VENV)/bin/python
STAMP := $(VENV)/everstep.stamp
endif

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED = 1
# Where the environment forbids it to keep bytecode, every one of the many processes would compile all that it imports.
export PYTHONDONTWRITEBYTECODE =

# Two replicas and a spare need a device each: three GPUs, or else the CPU.
DEMO_DEVICE ?= $(shell [ "$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')" -ge 3 ] && echo cuda || echo cpu)

.PHONY: demo test test-full test-vllm lint types setup docs manual clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(PY) -m everstep train examples/grpo_sort.yaml run_dir=runs/demo device=$(DEMO_DEVICE) --clean

# Files side by side: what tests wait for is other processes, deadlines and deaths.
SIDE_BY_SIDE := -n 2 --dist loadfile

test: lint types
	$(PY) -m pytest -m "not full" $(SIDE_BY_SIDE)

test-full: lint types
	$(PY) -m pytest $(SIDE_BY_SIDE)

# The real vLLM, on a CPU (on a GPU: pytest -m gpu tests/test_rollout_vllm.py).
VLLM_VENV ?= .venv-vllm
test-vllm:
	$(PYTHON) tools/install.py --venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python tools/install.py --vllm
	$(VLLM_VENV)/bin/python -m pytest -m full tests/test_rollout_vllm.py -k "real_vllm_on_a_cpu or real_vllm_engines"

lint: $(STAMP)
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy

docs: $(STAMP)
	$(PY) -m everstep.telemetry.docs docs

manual: $(STAMP)
	$(PY) -m mkdocs build -q

setup: $(STAMP)

$(STAMP): pyproject.toml tools/install.py
ifneq ($(strip $(VENV)),)
	$(PYTHON) tools/install.py --venv $(VENV)
endif
	$(PY) tools/install.py
	@mkdir -p $(dir $(STAMP)) && touch $(STAMP)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/everstep.egg-info
