# make setup      virtual environment with everything in it
# make train      fine-tune a pretrained language model on movie reviews, in less than four minutes
# make train-small  train a small GPT from random weights
# make train-ranks  train the GPT on two ranks of this machine, which divide the optimizer's state
# make train-sharded  train it sharded over two ranks, each of which has a part of the weights, too
# make test       tier 1 of the tests: every behavior once, in at most 8 minutes
# make test-ci    tiers 1 and 2, and the part of tier 3 that the commit draws, in at most 25 minutes
# make test-long  all tests that need no GPU; takes hours
# make mutants    prove that the tests find the defects of tests/mutants; takes hours
# make test-gpu   the tests that need a GPU
# make check      lint, formatting, types
# make format     fix lint and formatting
# make docs       build the documentation site in docs/_build/html; warnings are errors
# make picture    train a little and draw docs/compare.svg and docs/report.svg
# make bench      every benchmark; results go to benchmarks/results
# make gpu-first  the first ten minutes on a GPU: installation, correctness, one step; PYTHON=python3 runs it without set-up
# make gpu-evidence  what only a GPU can show, in parts of at most nine minutes; without a GPU it prints the parts
# make fake-gpu   an environment in which tests run PyTorch's CUDA build without a GPU: downloads 0.8 GB, 3 GB on the disk
# make deepspeed  a second environment with DeepSpeed, which benchmarks compare with
#
# Options of a job go after `--`, or in ARGS:
#   make train -- --compare
#   make gpu-evidence -- --part peers_4k --missing
#   make train ARGS="--policy zenflow --steps 100"
#   make bench ARGS="peers --model gpt"
#
# PYTHON=... runs a target in that interpreter as it is, without setting anything up.

VENV := .venv
STAMP := $(VENV)/.installed
ARGS ?=

ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
READY := $(STAMP)
endif

# GNU make reads words after `--` as goals, and `--name=value` as variables: pass both on to the job. Words after the first
# option belong to the options.
from_option = $(if $(filter-out --%,$(firstword $1)),$(call from_option,$(wordlist 2,$(words $1),$1)),$1)
OPTION_GOALS := $(call from_option,$(MAKECMDGOALS))
OPTIONS := $(or $(ARGS),$(OPTION_GOALS) $(filter --%,$(MAKEOVERRIDES)))

# Two test processes on two cores: one thread each, and no processes that compile in parallel.
TEST_PROCESSES ?= 2
# Bytecode is kept: the processes that run tests, and those that tests start, compile hundreds of files otherwise.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE=

SOURCES := zenflow_compile examples benchmarks scripts tests docs/conf.py

.PHONY: setup train train-small train-ranks train-sharded test test-ci test-long mutants test-gpu check format docs picture bench gpu-first gpu-evidence fake-gpu deepspeed clean $(OPTION_GOALS)
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup_env.sh scripts/refuse_cuda_build.py
	scripts/setup_env.sh $(VENV)
	@touch $@

train: $(READY)
	$(PYTHON) -m examples.classify $(OPTIONS)

train-small: $(READY)
	$(PYTHON) -m examples.train_gpt $(OPTIONS)

train-ranks: $(READY)
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 -m examples.train_gpt $(OPTIONS)

train-sharded: $(READY)
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 -m examples.train_gpt --fsdp $(OPTIONS)

RUN_TESTS = $(TEST_ENVIRONMENT) $(PYTHON) -m pytest -m "not gpu" -n $(TEST_PROCESSES) --dist worksteal

test: $(READY)
	$(RUN_TESTS) --tiers 1 $(OPTIONS)

test-ci: $(READY)
	$(RUN_TESTS) --tiers 1,2 $(OPTIONS)

test-long: $(READY)
	$(RUN_TESTS) --tiers all $(OPTIONS)

mutants: $(READY)
	$(PYTHON) -m scripts.mutants $(OPTIONS)

test-gpu: $(READY)
	$(PYTHON) -m pytest -m gpu --tiers all $(OPTIONS)

check: $(READY)
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) -m mypy

format: $(READY)
	$(PYTHON) -m ruff check --fix $(SOURCES)
	$(PYTHON) -m ruff format $(SOURCES)

docs: $(READY)
	$(PYTHON) -m sphinx -W --keep-going -q -b html docs docs/_build/html

picture: $(READY)
	$(PYTHON) -m examples.report_picture --out docs

bench: $(READY)
	$(PYTHON) -m benchmarks $(or $(strip $(OPTIONS)),all)

gpu-first: $(READY)
	$(PYTHON) -m benchmarks gpu_first $(OPTIONS)

gpu-evidence: $(READY)
	$(PYTHON) -m benchmarks gpu_evidence $(OPTIONS)

fake-gpu:
	scripts/setup_fake_gpu.sh

deepspeed: $(READY)
	scripts/setup_deepspeed.sh

clean:
	rm -rf $(VENV) .venv-deepspeed .venv-fake-gpu docs/_build build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(OPTION_GOALS):
	@:
