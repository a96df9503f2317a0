#!/usr/bin/env bash
# Train a drafter for SmolLM2-135M-Instruct on a CPU, from nothing: environment, model, chats, training, evaluation.
# ./examples/smollm2/run.sh [ARGUMENTS OF launch.sh], for example --set training.num_epochs=6 or --fresh.
# What is there already is used again; all of it is in .venv and examples/smollm2/.cache.
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
example=examples/smollm2
config=$example/config.json
cache=$example/.cache
run=$cache/runs/run

./tests/venv.sh example
export PATH="$PWD/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # as ds_dflash sets it, for the steps that don't import it

evaluate() { # DRAFTER FIGURES.json, unless the figures are newer than all they come from
    if [ "$2" -nt "$1/model.safetensors" ] && [ "$2" -nt "$cache/held_out.jsonl" ]; then
        return
    fi
    ds-dflash evaluate --target "$cache/target" --drafter "$1" --prompts "$cache/held_out.jsonl" \
        --max-new-tokens 32 --json >"$2.partial"
    mv "$2.partial" "$2"
}

echo "== The target and its answers"
python $example/get_target.py
python $example/make_data.py

echo "== Before training"
if [ ! "$cache/untrained/config.json" -nt "$config" ]; then
    rm -rf "$cache/untrained"
    ds-dflash init --config "$config" "$cache/untrained"
fi
evaluate "$cache/untrained" "$cache/untrained.json"

echo "== Training"
deepspeed launch.sh --config "$config" "$@"

echo "== After training"
evaluate "$run/drafter" "$cache/trained.json"
python $example/summary.py "$run/metrics.jsonl" "$cache/untrained.json" "$cache/trained.json"
