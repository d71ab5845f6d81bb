# Everything that a newcomer runs. Each target sets up what it needs in .venv, and starts at once the next time.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard kvmpi/*/compiled/*)

.PHONY: help demo test test-mxnet test-mpich test-intel test-sanitized lint check simulate docs bench clean

SEEDS ?= 10000
CORES = $(shell getconf _NPROCESSORS_ONLN)

help:
	@echo "make demo    train on real images with 4 workers, 2 MPI clients and 2 servers; under a minute after set-up"
	@echo "make test    formatting, types, architecture and all tests"
	@echo "make test-mxnet    the tests of kvmpi.mxnet, in an environment of its own (Python 3.10)"
	@echo "make test-mpich test-intel    the tests that want MPICH, and Intel's MPI, in environments of their own"
	@echo "make test-sanitized    those of the compiled code, with every access to memory checked; wants GCC or Clang"
	@echo "make simulate SEEDS=10000    jobs with faults in virtual time, as many as you like"
	@echo "make bench   allreduce, parameter server and engine, with the peers that are installed"
	@echo "make docs    the pages of docs/ that are generated from the code"
	@echo "make clean   remove .venv and everything that was built"

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit("kvmpi needs Python 3.10 or newer; choose one with make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo: $(VENV)/python $(SOURCES)
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[mpi,examples]'
	@touch $@

$(VENV)/test: $(VENV)/python $(SOURCES)
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[mpi,examples,test]'
	@touch $@ $(VENV)/demo

demo: $(VENV)/demo
	@$(BIN)/python examples/compare.py --algorithms mpi-esgd,mpi-sgd -n 4 -c 2 -s 2 --data digits \
		--target-accuracy 0.95 --out runs/demo

test: lint check

lint: $(VENV)/test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@# The import contract looks at the package as it is installed, with the launchers in their place.
	@$(PIP) install --quiet --no-deps --target build/installed --upgrade .
	@cd build/installed && $(abspath $(BIN))/lint-imports --no-cache --config ../../pyproject.toml

# Much of what tests do is wait for processes, so one more at a time than there are cores (with two more, ranks that wait for
# each other take longer than that saves); those of one file share jobs.
check: $(VENV)/test
	@$(BIN)/python -m pytest --numprocesses $$(($(CORES) + 1)) --dist loadfile --no-loadscope-reorder

# MXNet 1.9.1 wants an older Python and an older NumPy. Where they cannot be had, this says so and passes.
test-mxnet: $(VENV)/test
	@$(BIN)/python tests/gluon/environment.py $(VENV)-mxnet
	@$(BIN)/python -m pytest tests/gluon

# Other MPIs in environments of their own: two wheels in one would hide each other's mpirun.
$(VENV)-mpich/bin/mpirun: WHEEL := mpich
$(VENV)-intel/bin/mpirun: WHEEL := impi-rt
$(VENV)-mpich/bin/mpirun $(VENV)-intel/bin/mpirun: $(VENV)/python constraints.txt
	@$(PYTHON) -m venv $(@D)/..
	@$(@D)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(WHEEL)
	@touch $@

test-mpich: $(VENV)/test $(VENV)-mpich/bin/mpirun
	@KVMPI_MPIRUN=$(abspath $(VENV)-mpich/bin/mpirun) $(BIN)/python -m pytest -k mpich tests/collectives/test_mpi.py \
		tests/launch/test_launch_mpich.py

test-intel: $(VENV)/test $(VENV)-intel/bin/mpirun
	@KVMPI_MPIRUN=$(abspath $(VENV)-intel/bin/mpirun) $(BIN)/python -m pytest tests/launch/test_launch_mpich.py

# The compiled code, built once more with checks of memory and of undefined behaviour: what is wrong ends the tests. Their
# library has to be there before Python; what Python itself never frees is no leak of ours.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
SANITIZED := $(addprefix tests/kernels/test_kernels_,host.py quantize.py rows.py) \
	$(addprefix tests/collectives/test_,handover.py segments.py native.py shared.py links.py many_tensors.py narrowed.py)

test-sanitized: $(VENV)/test
	@CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" $(BIN)/python setup.py --quiet build --build-base build/sanitized
	@export PYTHONPATH="$$(echo $(CURDIR)/build/sanitized/lib.*)" ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" && \
		$(BIN)/python -P -c 'import kvmpi.collectives._native, kvmpi.kernels._halves' && \
		$(BIN)/pytest --numprocesses $(CORES) --dist loadfile $(SANITIZED)

simulate: $(VENV)/test
	@$(BIN)/python tests/simulation --count $(SEEDS) --processes $(CORES)

docs: $(VENV)/test
	@$(BIN)/python docs/generate.py

bench: $(VENV)/demo
	@$(BIN)/python benchmarks/engine_overhead.py
	@$(BIN)/kvmpi bench allreduce -n 2 --sizes 4K,64K,1M,16M,64M
	@$(BIN)/kvmpi bench ps -n 1,4 --sizes 4K,256K,4M,64M

clean:
	@rm -rf $(VENV) $(VENV)-mxnet $(VENV)-mpich $(VENV)-intel build runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
