"""The command `ds-dflash`: what surrounds a training run."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import ds_dflash.accelerator  # noqa: F401  before anything imports DeepSpeed
from ds_dflash import data, evaluate, figures, planner
from ds_dflash.checkpoint import best_checkpoint, is_whole, newest_checkpoint
from ds_dflash.config import Settings, TargetSettings, load_settings
from ds_dflash.errors import UserError, describe_os_error
from ds_dflash.export import FORMATS, check_fits, inspect, read_drafter, write_drafter
from ds_dflash.job import drafter_config, prepare_data
from ds_dflash.target import open_target
from ds_dflash.trainer import initial_drafter


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    except OSError as error:
        print(f"error: {describe_os_error(error)}", file=sys.stderr)
        return UserError.EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds-dflash", description="Around the training of a DFlash drafter.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prepare = commands.add_parser("prepare", help="tokenise the training data now, and say what became of its rows")
    _add_settings(prepare)
    prepare.add_argument("--show", type=int, default=0, metavar="N", help="print N rows, supervised tokens coloured")
    prepare.add_argument("--histogram", type=Path, metavar="FILE.png", help="write a histogram of the lengths")
    prepare.set_defaults(run=run_prepare)

    plan = commands.add_parser("plan", help="what batches the lengths of a dataset give, before a run")
    planner.add_arguments(plan)
    plan.set_defaults(run=planner.run)

    init = commands.add_parser("init", help="write the untrained drafter that a run would start from")
    _add_settings(init)
    init.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    init.set_defaults(run=run_init)

    export = commands.add_parser("export", help="write a run's drafter in a serving format, or check a directory")
    export.add_argument(
        "source",
        type=Path,
        nargs="?",
        metavar="RUN_OR_CHECKPOINT",
        help="runs/run, a checkpoint in it, or any drafter's directory",
    )
    export.add_argument("out", type=Path, nargs="?", metavar="OUT", help="a new directory")
    export.add_argument(
        "--format",
        choices=FORMATS,
        help="dflash: for vLLM and SGLang (default); speculators: as the package of this name",
    )
    export.add_argument(
        "--check", type=Path, metavar="DIR", help="say what is wrong with a drafter that is there; nothing is written"
    )
    export.add_argument(
        "--target",
        type=not_empty,
        metavar="DIR",
        help="the target, or its name on the hub: does the drafter fit it?",
    )
    export.set_defaults(run=run_export)

    evaluation = commands.add_parser("evaluate", help="decode prompts with target and drafter")
    evaluation.add_argument(
        "--target", required=True, type=not_empty, metavar="DIR", help="the target, or its name on the hub"
    )
    evaluation.add_argument("--drafter", required=True, type=Path, metavar="DIR", help="in the serving format")
    evaluation.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE.jsonl", help="rows of messages, prompt or input_ids"
    )
    evaluation.add_argument(
        "--max-new-tokens",
        type=positive_number,
        default=128,
        metavar="N",
        help="tokens to generate for each prompt, at most (128)",
    )
    evaluation.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="auto: the checkpoint's"
    )
    evaluation.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="of sampling; 0 (default): greedy"
    )
    evaluation.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="of sampling, together with a prompt's place (0)"
    )
    evaluation.add_argument(
        "--batch-size", type=positive_number, default=1, metavar="N", help="prompts decoded at once (1)"
    )
    evaluation.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    evaluation.set_defaults(run=run_evaluate)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("ds_config.json"), help="settings file (ds_config.json)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def positive_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def whole_number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not at least 0")
    return number


def temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 (greedy) nor a positive finite number")
    return number


def run_prepare(options: argparse.Namespace) -> int:
    settings = load_settings(options.config, options.set)
    target = open_target(settings.target)
    prepared = prepare_data(settings, settings.data.train, target)
    print(f"prepared in {prepared.directory}")
    print(data.describe(prepared))
    if options.show:
        print(data.show(prepared, data.load_tokenizer(target.path, settings.target.trust_remote_code), options.show))
    if options.histogram:
        data.histogram(prepared, options.histogram)
    return 0


def run_init(options: argparse.Namespace) -> int:
    settings: Settings = load_settings(options.config, options.set)
    target = open_target(settings.target)
    config = drafter_config(settings, target, data.load_tokenizer(target.path, settings.target.trust_remote_code))
    _refuse_to_overwrite(options.out)
    drafter = initial_drafter(config, settings.training.seed, settings.drafter.init_from)
    write_drafter(drafter.state_dict(), config, options.out)
    print(f"untrained drafter written to {options.out}")
    return 0


def run_export(options: argparse.Namespace) -> int:
    if options.check is not None:
        return run_check(options)
    if options.source is None or options.out is None:
        raise UserError("export needs a run or checkpoint and a new directory to write, or --check DIR.")
    if options.format == "speculators" and options.target is None:
        raise UserError("The format speculators names the target that engines load: give it with --target.")
    source = _drafter_of(options.source)
    _refuse_to_overwrite(options.out)
    config, weights = read_drafter(source)
    target = open_target(TargetSettings(path=options.target)) if options.target is not None else None
    if target is not None:
        check_fits(config, target, source)
    if options.format == "speculators":
        given = Path(options.target)
        name = str(given.resolve()) if given.is_dir() else options.target  # engines are started elsewhere
        write_drafter(weights, config, options.out, target, name)
        for sentence in inspect(options.out).warnings:
            print(f"warning: {sentence}")
    else:
        write_drafter(weights, config, options.out)
    print(f"{source.parent.name if source.name == 'drafter' else source.name} written to {options.out}")
    return 0


def _drafter_of(source: Path) -> Path:
    """The drafter of a run (of its best checkpoint, else the newest) or of a checkpoint, or `source` if it is one."""
    if any((source / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json")):
        return source
    checkpoints = source / "checkpoints"
    is_checkpoint = (source / "manifest.json").exists()
    newest = None if is_checkpoint else newest_checkpoint(checkpoints, warn=True)
    checkpoint = source if is_checkpoint else best_checkpoint(checkpoints) or newest
    if checkpoint is None or not is_whole(checkpoint):
        raise UserError(f"{source} is neither a run with a whole checkpoint nor a whole checkpoint, nor a drafter.")
    return checkpoint / "drafter"


def run_check(options: argparse.Namespace) -> int:
    """Exit code 1 if the directory does not hold the contract."""
    if options.source is not None or options.format is not None:
        raise UserError("--check reads a directory and tells its format itself: leave OUT and --format away.")
    target = open_target(TargetSettings(path=options.target)) if options.target is not None else None
    inspection = inspect(options.check, target)
    print(inspection.description)
    for sentence in inspection.warnings:
        print(f"warning: {sentence}")
    for sentence in inspection.violations:
        print(f"error: {sentence}", file=sys.stderr)
    if inspection.violations:
        return 1
    print("holds the contract")
    return 0


def _refuse_to_overwrite(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already: choose a new directory, or remove it first.")


def run_evaluate(options: argparse.Namespace) -> int:
    """Exit code 1 if an output differs from the target's own by more than a tie."""
    decoding = evaluate.DecodingOptions(options.max_new_tokens, options.temperature, options.seed, options.batch_size)
    results = evaluate.evaluate(options.target, options.drafter, options.prompts, options.dtype, decoding)
    print(json.dumps(results) if options.json else figures.describe(results))
    if results["different"]:
        print(f"error: {results['different']} outputs differ from the target's own.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
