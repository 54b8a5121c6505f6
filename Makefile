# Set-up, tests and benchmarks. Each target installs what it needs, once: `make run` or `make test` is all there is to type.

PYTHONS := python3.13 python3.12 python3.11 python3
PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
C_SOURCES := $(wildcard tiercache/fuse/*.[ch] tiercache/tiers/cold/*.[ch])
SANITIZED := tiercache/fuse/requests.c tiercache/fuse/open_table.c tiercache/fuse/inflight.c tiercache/fuse/names.c
CEPH := radosgw ceph-mon ceph-osd ceph-common
PYTEST_ARGS :=
BENCH_ARGS :=

SHELL := /bin/sh
.SHELLFLAGS := -euc
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: install run stop test test-sanitize test-rgw soak bench lint format clean
.DEFAULT_GOAL := install

# Sets $python to the first interpreter that can make a virtual environment and compile extensions (pyfuse3 comes as source), or to nothing.
define find_python
python=
for candidate in $(PYTHONS); do
    if "$$candidate" -c 'import ensurepip, os, sys, sysconfig, venv; sys.exit(sys.version_info < (3, 11) or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
    then python=$$candidate; break; fi
done
endef

# Installs the Debian packages named in $missing, or says in one line how to get them.
define install_missing
if [ -n "$$missing" ]; then
    if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "make: missing:$$missing; have root run: apt-get install$$missing (or install what your distribution calls them)" >&2
        exit 1
    fi
    echo "make: installing$$missing"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq -y install --no-install-recommends $$missing >/dev/null; } || {
        echo "make: apt-get could not install$$missing; see its message above" >&2
        exit 1
    }
fi
endef

install: $(INSTALLED)
	@:

$(INSTALLED): pyproject.toml setup.py constraints.txt Makefile $(C_SOURCES)
	@missing=
	command -v fusermount3 >/dev/null || missing="$$missing fuse3"
	command -v pkg-config >/dev/null || missing="$$missing pkg-config"
	for library in fuse3=libfuse3-dev libcurl=libcurl4-openssl-dev libcrypto=libssl-dev libxxhash=libxxhash-dev; do
	    pkg-config --exists "$${library%%=*}" 2>/dev/null || missing="$$missing $${library#*=}"
	done
	echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1 || missing="$$missing gcc libc6-dev"
	$(find_python)
	[ -n "$$python" ] || missing="$$missing python3 python3-dev python3-venv"
	$(install_missing)
	[ -n "$$python" ] || { $(find_python)
	}
	if [ -z "$$python" ]; then
	    echo "make: no Python >= 3.11 with venv and headers; install python3.11 (or newer), its -dev and its -venv package" >&2
	    exit 1
	fi
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || "$$python" -m venv --clear .venv
	echo "make: installing the pinned Python packages into .venv"
	TIERCACHE_STRICT_BUILD=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	    $(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev]' || {
	    echo "make: pip could not install the packages of constraints.txt; see its message above (is a package index reachable?)" >&2
	    exit 1
	}
	touch $@

run: $(INSTALLED)
	@$(PYTHON) bench/demo.py

stop: $(INSTALLED)
	@$(PYTHON) bench/demo.py stop

test: $(INSTALLED)
	@$(PYTHON) -m pytest -m 'not rgw and not soak' $(PYTEST_ARGS)

# The parts of the native side that are pure, on random and recorded input. Needs nothing but a C compiler.
test-sanitize:
	@missing=
	echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1 || missing=' gcc libc6-dev'
	$(install_missing)
	mkdir -p build
	gcc -std=gnu11 -O1 -g -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all -Itiercache/fuse \
	    -o build/sanitized-driver tests/native/driver.c $(SANITIZED)
	build/sanitized-driver

test-rgw: $(INSTALLED)
	@missing=
	for program in radosgw ceph-mon ceph-osd ceph; do
	    command -v "$$program" >/dev/null || missing=' $(CEPH)'
	done
	$(install_missing)
	$(PYTHON) -m pytest -m rgw $(PYTEST_ARGS)

soak: $(INSTALLED)
	@$(PYTHON) -m pytest -m soak $(PYTEST_ARGS)

bench: $(INSTALLED)
	@$(PYTHON) bench/benchmark.py $(BENCH_ARGS)

lint: $(INSTALLED)
	@$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(INSTALLED)
	@$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean:
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
