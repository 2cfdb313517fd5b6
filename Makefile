# make demo    train RLlib PPO with ledgers on, once clean and once with an injected fault, and print both comparisons
# make test    all tests
# make test-long    those that take long: all algorithms with all vectorisations and Learners, EnvRunners killed at twenty moments;
#              Stable-Baselines3: all algorithms, wrappers and stray calls over 20,000 steps each, the post's scripts over 200,000;
#              200 runs killed at random moments; a disk that fails at every call that writes;
#              every byte of small ledgers damaged in every way
# make fuzz    ten minutes (FUZZ_SECONDS) of files that atheris makes of small ledgers, in an environment of its own: PYTHON must be one that
#              atheris has a wheel for, such as 3.11
# make lint    ruff and mypy
# make bench   what recording costs, here
#
# Each sets itself up: a virtual environment in .venv, made once, with the versions in constraints.txt. Needs Python 3.10 or newer.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long fuzz lint bench clean

demo: $(READY)
	@rm -rf build/demo
	@echo "== RLlib PPO on CartPole, two remote EnvRunners, ledgers on =="
	RAY_BACKEND_LOG_LEVEL=fatal $(BIN)/python examples/rllib_ppo.py --directory build/demo/clean
	@echo
	@echo "== the same with a fault: one environment's observations are rounded to float16 on the way, one in ten =="
	RAY_BACKEND_LOG_LEVEL=fatal $(BIN)/python examples/rllib_ppo.py --directory build/demo/fault --fault obs:f16; test $$? -eq 1
	@echo
	@echo "To look again: $(BIN)/stepledger compare build/demo/fault"

# Tests that need Ray share one cluster, so they run in one process.
test: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not ray"
	$(BIN)/python -m pytest -q -m ray

# Tests here do more of the same where STEPLEDGER_LONG is set; the others that take long are marked so.
MORE := $(addprefix tests/test_,damage.py disks.py processes.py sb3_learner.py sb3_post.py)

test-long: $(READY)
	STEPLEDGER_LONG=1 $(BIN)/python -m pytest -q -s -m long $(addprefix --ignore=,$(MORE))
	STEPLEDGER_LONG=1 $(BIN)/python -m pytest -q -n $(WORKERS) $(MORE)

# What was found lies in build/fuzz; what was new to it is added to the corpus, of which git keeps a few.
FUZZ_SECONDS ?= 600
FUZZ_VENV ?= .venv-fuzz
FUZZ_READY := $(FUZZ_VENV)/.ready

fuzz: $(FUZZ_READY)
	@mkdir -p build/fuzz/corpus
	$(FUZZ_VENV)/bin/python fuzz/fuzz_ledger.py build/fuzz/corpus fuzz/corpus -max_total_time=$(FUZZ_SECONDS) -max_len=16000 -timeout=20 \
		-rss_limit_mb=1024 -artifact_prefix=build/fuzz/ -print_final_stats=1

$(FUZZ_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install -qq -c constraints.txt -e . pytest atheris
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --exclude '*.md' .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

$(READY): pyproject.toml constraints.txt
	@echo "== setting up $(VENV): takes a few minutes, once =="
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(FUZZ_VENV) build *.egg-info
