# Needs only Python 3.11+ and make:  make demo  |  make test
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# The jax build for this machine: NVIDIA's where nvidia-smi answers, else the plain one.
ACCELERATOR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda)
EXTRAS = $(if $(ACCELERATOR),[$(ACCELERATOR)],)
PREFIX_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location --prefix
TEST_EXTRAS = [test$(if $(ACCELERATOR),$(,)$(ACCELERATOR),)]
, := ,

.PHONY: demo test test-slow test-kernels check format peers native native-test native-sanitize docs docs-links package clean

demo: $(VENV)/.installed  ## install, then show the product in under three minutes
	$(BIN)/hotloop demo

test: check  ## install with the test extras, then check and test everything that is not slow
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

test-slow: $(VENV)/.installed-test  ## the tests that take longer; those that compare times by themselves, as others' work would be in them
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow and not alone"
	$(BIN)/python -m pytest -n 0 -m "slow and alone"

test-kernels: $(VENV)/.installed-test  ## kernels for NVIDIA's cards, on the CPU: needs Python 3.12, for jax 0.11.2
	$(BIN)/python -c 'import jax, sys; jax.__version_info__ >= (0, 11, 2) or sys.exit("needs jax 0.11.2, and so Python 3.12")'
	$(BIN)/python -m pytest -n auto --dist worksteal \
		tests/layers/test_bundled.py tests/layers/test_persistent.py tests/layers/test_persistent_layers.py \
		tests/layers/test_persistent_exchange.py tests/families/test_vcd_fused.py tests/families/test_vcd_hopper.py

check: $(VENV)/.installed-test  ## format, lint, types and the import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

peers: $(VENV)/.installed-peers  ## ours against torch, BlackJAX, Keras and flax, interleaved: needs a quiet machine
	$(BIN)/hotloop bench peers

native: | $(BIN)/python  ## the wheel of oneDNN's kernels for the CPU, in native/dist (a C++ compiler is needed)
	rm -rf native/dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir native/dist ./native

native-test: native | $(VENV)/.installed-test  ## its tests, the wheel installed beside the environment
	rm -rf native/build/installed
	$(PREFIX_INSTALL) native/build/installed native/dist/*.whl
	export PYTHONPATH=$$(echo $(CURDIR)/native/build/installed/lib/python*/site-packages):$(PYTHONPATH) && \
		$(BIN)/python -m pytest -n auto --dist worksteal -m "not alone" tests/native tests/layers/test_native_conv.py && \
		$(BIN)/python -m pytest -n 0 -m alone tests/native

native-sanitize: | $(VENV)/.installed  ## its C++ under the address and undefined behaviour sanitizers
	$(PREFIX_INSTALL) native/build/required $$($(BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('native/pyproject.toml', 'rb'))['build-system']['requires'])")
	PYTHONPATH=$$(echo $(CURDIR)/native/build/required/lib/python*/site-packages) \
		cmake -S native -B native/build/sanitize -DPython_EXECUTABLE=$$(realpath -s $(BIN)/python) -DHOTLOOP_NATIVE_CHECKS=ON \
		-DCMAKE_BUILD_TYPE=None \
		-DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
	cmake --build native/build/sanitize --parallel
	native/build/sanitize/bernoulli_check
	native/build/sanitize/convolution_check
	native/build/sanitize/norm_check
	native/build/sanitize/recurrent_check
	native/build/sanitize/resample_check
	native/build/sanitize/tied_check

docs: $(VENV)/.installed-docs  ## the site, in build/site: tutorials are run, warnings are errors, links and names are checked
	rm -rf build/site
	$(BIN)/python -m sphinx -q -W --keep-going -E -j auto -d build/doctrees -b html docs build/site
	$(BIN)/python docs/check_site.py build/site

docs-links: $(VENV)/.installed-docs  ## links of the pages to other places, over the network
	$(BIN)/python -m sphinx -q -D nb_execution_mode=off -d build/doctrees -b linkcheck docs build/links

package:  ## sdist and wheel in dist/, checked; the wheel alone in a fresh environment, and its demo run there
	rm -rf dist .venv-package .venv-wheel
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python -m pip install --quiet --disable-pip-version-check build twine
	.venv-package/bin/python -m build --outdir dist .
	.venv-package/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	mkdir -p build/wheel && cd build/wheel && $(CURDIR)/.venv-wheel/bin/hotloop demo

clean:
	rm -rf $(VENV) .venv-* build dist native/build native/dist .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "hotloop needs Python 3.11 or newer (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(EXTRAS)'
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(TEST_EXTRAS)'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs$(if $(ACCELERATOR),$(,)$(ACCELERATOR),)]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-peers: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[peers]'
	@touch $@
