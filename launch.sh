#!/bin/sh
''':'
# Trains what ds_config.json says. A shell script and a Python file at once, so all of these work:
#   deepspeed launch.sh            deepspeed --num_accelerators 8 launch.sh --config FILE --set section.name=value
#   ./launch.sh                    bash launch.sh --fresh
# As a shell script it starts the launcher on itself; the launcher runs it with Python on every rank.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
PATH="$PATH:$here/.venv/bin"
export PATH
if ! command -v deepspeed >/dev/null 2>&1; then
    echo "error: there is no deepspeed command: activate the virtual environment that ds_dflash is installed in." >&2
    exit 127
fi
exec deepspeed "$0" "$@"
: <<'PYTHON'
'''

import sys

from ds_dflash.train import main

sys.exit(main())
PYTHON = None
