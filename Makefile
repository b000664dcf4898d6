PYTHON ?= python3
VENV := .venv
HUB ?= ../shared/tools/hub_server.py
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRITON ?= triton==3.9.0
KERNELS := $(VENV)/kernels

.PHONY: help train test coverage suite lint docs gpu kernels speed-check properties hub versions mutants faults long audit

help:
	@echo "make train   set up .venv and train the default decoder (ARGS='--max_steps 100' adds arguments)"
	@echo "make test    set up .venv and run the tests (ARGS='-k data' adds arguments)"
	@echo "make coverage  run the tests, and name the lines and branches of the package that none of them reaches"
	@echo "make suite   run transformers' common model tests on all rows (ARGS='--row Decoder_rope' chooses)"
	@echo "make gpu     measure all that is to be known of a GPU, in 8 minutes (ARGS='--device cpu --quick' tries the command)"
	@echo "make kernels  test the Triton kernels without a GPU: in Triton's interpreter, and by compiling them for GPUs"
	@echo "make speed-check  time a few schemes, and fail where one is slower than the committed report says"
	@echo "make properties  try 10,000 random configurations (ARGS='--examples 500 --seed 1')"
	@echo "make mutants break the package in some 200 ways, and see which test notices (ARGS='--only toeplitz' chooses)"
	@echo "make faults  kill, fill, cut and damage runs, and see whether they go on with the same bits (ARGS='--times 2 --only SIGKILL')"
	@echo "make long    100,000 steps, 1,000 saves, 10,000 turns of a chat: is memory flat? (ARGS='--scale 0.01' is a short trial)"
	@echo "make audit   ask for known holes in the tested versions, and list the licences of what is installed"
	@echo "make lint    set up .venv and run ruff and pyright"
	@echo "make docs    set up .venv and build the documentation into site/; 'make docs ARGS=serve' shows it while you write"
	@echo "make hub     push to a Hub on this machine, delete the environment, pull in another (HUB=script that plays the Hub)"
	@echo "make versions  test the oldest, the tested and the newest versions, which exchange folders (ARGS='-s \"versions(oldest)\"')"

# torch comes first and alone: pip then takes the build that this machine is set up for.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --upgrade pip
	$(BIN)/pip install --constraint constraints.txt torch
	$(BIN)/pip install --constraint constraints.txt --editable '.[train,test]'
	touch $@

# An interrupted run goes on from its last checkpoint, a finished one is only evaluated again.
train: $(INSTALLED)
	$(BIN)/python train_lm.py configs/default.yaml --resume_from_checkpoint auto $(ARGS)

# Names the slowest tests: the whole run has 12 minutes on two cores.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --durations 40 --durations-min 3 $(ARGS)

# Of what runs in this process and its workers: what tests start as a command of its own is not counted.
coverage: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pytest -n auto --cov --cov-report term $(ARGS)

# pip fetches the tests: they are in the source distribution of the installed transformers.
suite: $(INSTALLED)
	$(BIN)/python tests/common_suite/run_suite.py -n auto $(ARGS)

# Goes on where it was stopped; the report is runs/gpu/report.md.
gpu: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[benchmark]'
	$(BIN)/python tests/benchmarks/gpu.py $(ARGS)

# Triton (1 GB) lies in a folder of its own, so that the default environment stays without it.
$(KERNELS): $(INSTALLED)
	$(BIN)/pip install --quiet --no-deps --target $@ $(TRITON)

kernels: $(KERNELS)
	PYTHONPATH=$(KERNELS) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto -q tests/test_triton_kernels.py $(ARGS)
	PYTHONPATH=$(KERNELS):tests:. $(BIN)/python tests/compile_kernels.py

# Compares with docs/benchmarks/reports/steps.md; by hand and at night, never in the tests.
speed-check: $(INSTALLED)
	$(BIN)/python tests/benchmarks/speed_check.py $(ARGS)

properties: $(INSTALLED)
	$(BIN)/python tests/random_models.py $(ARGS)

# Writes docs/benchmarks/mutants.md, and goes on where it was stopped.
mutants: $(INSTALLED)
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Writes docs/benchmarks/faults.md, and goes on where it was stopped.
faults: $(INSTALLED)
	$(BIN)/python tests/faults/run.py --hub $(HUB) $(ARGS)

# Writes docs/benchmarks/long_runs.md.
long: $(INSTALLED)
	$(BIN)/python tests/long_runs.py $(ARGS)

# Fails at a version with a known hole, and at a licence that would bear on whoever installs the package.
audit: $(INSTALLED)
	$(BIN)/pip install --quiet pip-audit pip-licenses
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip
	$(BIN)/pip-licenses --format markdown --partial-match --fail-on "GNU General Public;GPLv2;GPLv3;AGPL;Affero"

lint: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs $(or $(ARGS),build --strict)

hub: $(INSTALLED)
	$(BIN)/python tests/hub_round_trip.py $(HUB)

versions: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/nox $(ARGS)
