# `make demo` and `make test` set everything up on a fresh machine; the other targets build on the same environment.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
PYTHON := .venv/bin/python
PROMPT ?= Compute the mean of the array along the given axis.
# Two workers: JAX itself uses the remaining cores.
PYTEST := $(PYTHON) -m pytest -n 2 --dist loadfile --durations 10 --durations-min 10

.PHONY: help setup demo test test-full test-gpu lint format doctest wheel-check compile-check bench lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: ## make .venv with the locked packages and the project
	@scripts/setup.sh main

demo: setup ## let the shipped model write text through the paged cache
	@.venv/bin/dsa-jax generate "$(PROMPT)"

.cuda-wheels: setup
	@scripts/setup.sh compile
.PHONY: .cuda-wheels

test: setup ## run the tests on the CPU
	$(PYTEST)

test-full: .cuda-wheels ## run the slow tests as well, and where there is an NVIDIA card, the full product of the kernels on it
	$(PYTEST) -m "not gpu"
	if nvidia-smi -L >/dev/null 2>&1; then $(PYTHON) -m pytest -m gpu; else echo "no card: the tests on one were left out"; fi

test-gpu: setup ## run the tests that need an NVIDIA card, without the full product
	$(PYTHON) -m pytest -m "gpu and not full"

lint: setup ## check style, format and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@mkdir -p typings/dsa_jax && ln -sfn ../../models typings/dsa_jax/models
	$(PYTHON) -m pyright

format: setup ## rewrite the code in the project's format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

doctest: setup ## run the examples of the docstrings
	$(PYTHON) -m pytest tests/test_doctests.py

wheel-check: setup ## build the wheel and use it outside the checkout
	@scripts/check_wheel.sh

# Compiling takes as long as the other tests together: it has a target of its own. The next JAX gets a sample of the cases,
# every test and each twelfth of its cases; `make compile-check ONE_IN=1` gives it all. What is `full` is left to `make test-full`.
ONE_IN ?= 12
compile-check: .cuda-wheels ## compile the GPU kernels, ptxas included, with this JAX and the next, without a GPU
	$(PYTEST) tests -m "compile and not full"
	@scripts/setup.sh jax-0.12
	@if [ -x .venv-jax-0.12/bin/python ]; then .venv-jax-0.12/bin/python -m pytest -n 2 --dist loadfile tests -m "compile and not full" --one-in $(ONE_IN); fi

bench: setup ## run the benchmarks
	$(PYTHON) -m benchmarks

lock: setup ## resolve the lock files again
	@scripts/lock.sh

clean: ## remove what the targets made, environments included
	rm -rf .venv .venv-jax-0.12 .cuda-wheels .uv build dist typings dsa_jax.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
