# `make test` and `make demo` each set up a fresh machine and do their job; run again they start in seconds.
# PYTHON chooses the interpreter of a new venv (3.11 or later), VENV its place, ARGS goes to pytest or to `dq demo`, JOBS is the
# number of pytest's processes (0: this one).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= logical
PY := $(VENV)/bin/python
DEMO_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test

EXTRAS_demo := eval
EXTRAS_test := eval,lora,interop,export,dev

.PHONY: help install test demo lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make test    run the test suite       (ARGS='-k packaging' for a part)"
	@echo "make demo    quantize the demo model, write report.html"
	@echo "make lint    ruff check and format --check;  make format  applies both;  make clean  removes what was built"

install: $(TEST_STAMP)

# A venv made by other means is completed, not replaced. torch and torchvision go first and as a pair: the two must match.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@test -x $(PY) || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dq needs Python 3.11 or later; set PYTHON=")' && $(PYTHON) -m venv $(VENV); }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	$(PY) -m pip install --quiet --constraint constraints.txt torch==2.14.1 torchvision==0.29.1
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS_$*)]'
	@touch $@

# The suite includes ruff, the layering, the size and the packaging tests; no test reaches a network.
test: $(TEST_STAMP)
	HF_HUB_OFFLINE=1 $(PY) -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist loadfile $(ARGS)

demo: $(DEMO_STAMP)
	$(PY) -m dq.cli demo --out report.html $(ARGS)

lint: $(TEST_STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(TEST_STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf dist build report.html .pytest_cache .ruff_cache .hypothesis
	find dq kernels pipelines eval tests -name __pycache__ -type d -prune -exec rm -rf {} +
