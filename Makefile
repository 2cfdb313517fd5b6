# make demo    train RLlib PPO with ledgers on, once clean and once with an injected fault, and print both comparisons
# make test    all tests
# make test-long    those that take long: all algorithms with all vectorisations and Learners, EnvRunners killed at twenty moments;
#              Stable-Baselines3: all algorithms, wrappers and stray calls over 20,000 steps each, the post's scripts over 200,000
# make lint    ruff and mypy
# make bench   what recording costs, here
#
# Each sets itself up: a virtual environment in .venv, made once, with the versions in constraints.txt. Needs Python 3.10 or newer.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long lint bench clean

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

test-long: $(READY)
	STEPLEDGER_LONG=1 $(BIN)/python -m pytest -q -s -m long
	STEPLEDGER_LONG=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/test_sb3_learner.py tests/test_sb3_post.py

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
	rm -rf $(VENV) build *.egg-info
