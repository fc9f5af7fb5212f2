# `make` lists what there is. DEVICE=cpu or DEVICE=cuda overrides the choice of engine.

SHELL := bash
.SHELLFLAGS := -euc
.DEFAULT_GOAL := help
.PHONY: help venv run test lint bench proto lock clean

ifndef DEVICE
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE is cpu or cuda, not '$(DEVICE)')
endif
BIN := .venv/bin
TINY := .run/tiny-model
MODEL ?= $(TINY)
ARGS ?=

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 8

venv: .venv/.ready-$(DEVICE) ## Build .venv from the lock file (DEVICE=cpu|cuda; PYTHON=... to choose one)

.venv/.ready-$(DEVICE): requirements/$(DEVICE).txt requirements/install pyproject.toml
	@requirements/install $(DEVICE)
	@touch $@

# The tiny model's own engine arguments: without them vLLM compiles it and reserves most of the memory.
ifeq ($(MODEL),$(TINY))
ENGINE_ARGS ?= $$($(BIN)/python -c 'from service.engine.tiny_model import ENGINE_ARGS; print(*ENGINE_ARGS)')
endif

run: venv $(filter $(TINY),$(MODEL)) ## Serve a tiny model on real vLLM, with NATS (MODEL=, ARGS=options, ENGINE_ARGS=)
	@exec $(BIN)/watchkeeper serve $(MODEL) $(ARGS) -- $(ENGINE_ARGS)

$(TINY): | venv
	@echo 'watchkeeper: writing a tiny model to $@'
	@mkdir -p $(@D)
	@rm -rf $@.part
	@$(BIN)/watchkeeper tiny-model $@.part --seed 0
	@mv $@.part $@

test: venv ## Run all tests (ARGS='-m "not real"' leaves out those on real vLLM)
	@$(BIN)/python -m pytest -n 2 $(ARGS)

lint: venv ## Check style, types and import rules
	@failed=; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/mypy || failed=1; \
	$(BIN)/lint-imports || failed=1; \
	test -z "$$failed"

BENCH ?= control_latency fleet router_throughput router_drills
bench: venv .venv/bench/.ready ## Measure commands on real vLLM, a fleet, the router (BENCH=one of them, ARGS=for it)
	@failed=; \
	$(foreach name,$(BENCH),$(BIN)/python -m benchmarks.$(name) $(ARGS) || failed=1;) \
	test -z "$$failed"

# What is only compared with has a place of its own and changes nothing that the lock holds.
.venv/bench/.ready: requirements/bench.txt | venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $<
	@touch $@

proto: venv ## Generate service/engine/rpc from service/engine/*.proto
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python service/engine/rpc/generate.py

# PIP_FIND_LINKS, where it is set, may hold the CPU build of torch; otherwise uv looks on PyTorch's index.
UV ?= $(BIN)/uv
LOCK = $(UV) pip compile pyproject.toml --quiet --extra dev --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28 --annotation-style line --custom-compile-command 'make lock' \
  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec
lock: ## Resolve pyproject.toml again into requirements/*.txt (ARGS=--upgrade for the newest releases)
	@test -x $(UV) || $(MAKE) --no-print-directory venv
	@echo 'requirements/cpu.txt'
	@$(if $(PIP_FIND_LINKS),UV_FIND_LINKS='$(PIP_FIND_LINKS)') $(LOCK) $(ARGS) --extra cpu \
	  $(if $(PIP_FIND_LINKS),,--torch-backend cpu) -o requirements/cpu.txt >/dev/null
	@echo 'requirements/cuda.txt'
	@$(LOCK) $(ARGS) --extra cuda -o requirements/cuda.txt >/dev/null

clean: ## Remove all that make has built, .venv too
	rm -rf .venv .run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
