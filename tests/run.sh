#!/usr/bin/env bash
# ./tests/run.sh [PYTEST ARGUMENTS]: lint, format, types and the tests, in .venv, which is made where it is missing.
# Without downloads of the example's model: ./tests/run.sh -m "not real". In less time: -m "not slow and not real".
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/.."
./tests/venv.sh dev,example
export PATH="$PWD/.venv/bin:$PATH"

ruff check .
ruff format --check .
mypy
python -m pytest "$@"
