# `make quickstart` and `make test` do all the set-up; see README.md.
# pyenv builds Python without optimizations, which takes a quarter more processor time. Then use the system's Python of the
# same version, if it has venv and the headers with which Triton compiles.
SYSTEM = $(shell python3 -c "import sys, sysconfig; \
	fast = '--enable-optimizations' in sysconfig.get_config_var('CONFIG_ARGS'); own = sys.prefix != sys.base_prefix; \
	print('' if fast or own else '/usr/bin/python%d.%d' % sys.version_info[:2])")
PYTHON ?= $(shell $(or $(SYSTEM),false) -c "import ensurepip, sysconfig; open(sysconfig.get_path('include') + '/Python.h')" \
	2> /dev/null && echo $(SYSTEM) || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Container images often set this variable. Then Python writes no bytecode, and each process compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install quickstart check test nightly soak lint bench clean

install: $(STAMP)

# Trains with adaptive, then twenty of the same steps with static, and compares these steps. Run it again to resume.
quickstart: $(STAMP)
	$(BIN)/bytescale train recipe=quickstart run.out=runs/quickstart
	$(BIN)/bytescale train recipe=quickstart run.out=runs/quickstart-static planner=static run.steps=20 \
		run.validate_every=20 run.checkpoint_every=20
	$(BIN)/bytescale report runs/quickstart runs/quickstart-static --out runs/quickstart.html --open

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder

# A contributor's loop, meant to take at most 300 s of processor time; nothing enforces that. Each worker takes 12 s to
# collect the tests, so there are fewer.
check: lint
	$(PYTEST) --numprocesses 2 -m "not world and not long and not slow and not gpu"

test: lint
	$(PYTEST)

nightly: lint
	$(PYTEST) --timeout 3600 -o faulthandler_timeout=4000 -m "slow and not gpu"
	$(MAKE) soak

# Faults of all kinds, and at random moments; it writes the table in docs/reliability.md.
MOMENTS ?= 50
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --moments $(MOMENTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/hdp_vs_static.py
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/simulator_vs_real.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/bytescale simulate recipe=llama7b-256k batch_tokens=8M > /dev/null  # compiles the planner, once
	$(BIN)/bytescale plan recipe=llama7b-256k zero.stage=3 batch_tokens=8M > /dev/null  # its part for ZeRO-3
	$(BIN)/bytescale plan recipe=llama70b-2m-paper batch_tokens=8M > /dev/null  # that for pipelines
	$(BIN)/bytescale plan recipe=quickstart > /dev/null  # and what draws documents
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
