# The project's commands, for people; CMakeLists.txt holds the build itself. `make` prints the table.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Parallel jobs: one per core, and 2 GB of memory for each (a room that includes torch needs that much).
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemAvailable/ {fit = int($$2 / 2000000); \
  print fit < 1 ? 1 : fit < cores ? fit : cores}' /proc/meminfo)

# The Python that has torch.
PYTHON := $(if $(FSDP_TORCH),python3,.venv/bin/python)

# Open MPI refuses to run as root (containers) unless told twice.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: help setup ready ready-to-train build python test test-more test-all test-full soak train bench bench-train bench-gpu lint format asan tsan clean

help:  ## this table
	@printf 'fsdp.cpp: fully sharded data-parallel training in C++ on libtorch\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n  JOBS=n        parallel jobs (here: $(JOBS))\n'
	@printf '  FSDP_TORCH=d  use the libtorch in folder d (2.11 to 2.13) instead of the one in .venv\n'

setup:  ## install what is missing (Debian packages, .venv) and show every part
	@tools/setup.sh

ready:
	@tools/setup.sh --quiet

ready-to-train:
	@tools/setup.sh --quiet --torch

build: ready  ## build everything, optimised, into build/release
	@tools/build.sh release -j $(JOBS)

# These prove a claim again, with other numbers of ranks, for longer, or with tools that are seldom there.
MORE_TESTS := more|fuzz|device

test: ready  ## build, then run the tests: every capability once
	@tools/build.sh release -j $(JOBS) --target tests
	@tools/test.sh release -j $(JOBS) -LE '$(MORE_TESTS)'

test-more: build  ## the tests that `make test` leaves out
	@tools/test.sh release -j $(JOBS) -L '$(MORE_TESTS)'

test-all: test test-more  ## every test

test-full: build  ## the same, with every case of the parity suite instead of a covering subset
	@tools/test.sh release -j $(JOBS) -C full

MINUTES ?= 10
soak: build  ## small jobs of all backends again and again beside other work, for MINUTES=10: the same bits every time?
	@$(PYTHON) tests/processes/soak.py --minutes $(MINUTES) build/release/bin/fsdp \
	  $(if $(shell command -v mpirun),mpirun --oversubscribe --quiet)

# TRAIN takes further flags: make train TRAIN="--model moe-tiny --steps 50"
train: ready-to-train  ## train a small language model on this repository's own text, on 2 ranks, in runs/tiny
	@tools/build.sh release -j $(JOBS) --target fsdp_command
	@build/release/bin/fsdp train --ranks 2 --data README.md docs src --checkpoint-dir runs/tiny $(TRAIN)

python: ready  ## build the Python package fsdp_cpp and install it into .venv (or beside the torch of FSDP_TORCH)
	@tools/build.sh release -j $(JOBS) --target fsdp_python
	@$(PYTHON) -m pip install -q --no-build-isolation --no-deps --force-reinstall -C build-dir=build/release \
	  -C cmake.define.FSDP_TESTS=ON -C cmake.define.FSDP_BENCH=ON .
	@$(PYTHON) -m fsdp_cpp

bench: build  ## build, then run the benchmarks in build/release/bin/bench_*
	@tools/bench.sh

bench-train: build  ## build, then race `fsdp train` against PyTorch's FSDP2
	@$(PYTHON) bench/train.py

# Rows, models and rounds: make bench-gpu GPU="--rows ours fsdp2 --models llama-1b"
bench-gpu: ready  ## build for CUDA, then race training steps against PyTorch, FSDP2 and Megatron-FSDP on one GPU
	@cmake --preset cuda && cmake --build --preset cuda -j $(JOBS) --target bench_gpu
	@$(PYTHON) bench/gpu.py $(GPU)

lint: ready  ## check formatting, rooms, sizes, scripts
	@tools/lint.sh

format: ready  ## rewrite the C++ files the way lint wants them
	@tools/lint.sh --fix

asan: ready  ## build and test with the address and undefined-behaviour sanitizers
	@tools/build.sh asan -j $(JOBS)
	@tools/test.sh asan -j $(JOBS) -L 'unit|ranks'

tsan: ready  ## build and test with the thread sanitizer
	@tools/build.sh tsan -j $(JOBS)
	@tools/test.sh tsan -j $(JOBS) -L 'unit|ranks'

clean:  ## delete build/ (.venv stays)
	rm -rf build
