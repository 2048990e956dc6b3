"""The command line: megatron-rl VERB CONFIG.yaml [MORE.yaml ...] [key=value ...].

Imports no torch until a run starts.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import takewhile
from pathlib import Path

from megatron_rl.cluster import stop
from megatron_rl.config.checks.model import read_actor_shape
from megatron_rl.config.checks.table import Verb
from megatron_rl.config.checks.unused import idle_settings
from megatron_rl.config.load import Resolved, dump_yaml, resolve, run_schema, settings_of, to_dict
from megatron_rl.config.run import RunConfig
from megatron_rl.config.tables import TableRow, batch_table, format_table, layout_table
from megatron_rl.config.text.foreign import foreign_arguments
from megatron_rl.config.text.keys import as_markdown, find_keys, near_words
from megatron_rl.config.text.keys import as_text as list_of_keys
from megatron_rl.config.text.reader import NoEffect
from megatron_rl.errors import ConfigError, DataError, Fault, MegatronRLError
from megatron_rl.observe.versions import versions_line
from megatron_rl.pipeline.check import load_pipeline
from megatron_rl.pipeline.spec import is_pipeline
from megatron_rl.reshard.planning import request as plan_request
from megatron_rl.reshard.planning.report import as_json, as_text, make_report

VERBS: dict[str, str] = {
    "check": "resolve the config and print the run, its batch arithmetic and its layout; start nothing",
    "train": "run the training that the config describes",
    "run": "run the stages of a pipeline that are not done yet",
    "eval": "score the model on data.val_files",
    "export": "write the model's weights in Hugging Face form",
    "status": "show what runs are doing, from the files of their folders",
    "keys": "list the keys of a run with type, choices, default and meaning: all, a section's, or those with a word",
    "plan": "estimate the bytes, seconds and memory of a weight sync between two layouts; needs no GPU",
}
REFUSED = 2
"""Exit code when the config, the data or the machine cannot do what was asked; the reason is on stderr."""


PIPE_CLOSED = 141
"""Exit code when the reader of a listing went away (`megatron-rl check ... | head`): 128 + SIGPIPE, as in a shell."""
LISTINGS = ("check", "status", "keys", "plan", "--help", "--version")
"""What only prints, and so has nothing left to do when nobody reads on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the process's exit code. For a signal that asked to end that is 128 + its number, or
    stop.REQUEUE where the same command goes on.

    Errors that are not the user's to mend are raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else "--help"
    verb = {"-h": "--help", "help": "--help", "version": "--version"}.get(verb, verb)
    try:
        with stop.signals():
            return _until_the_pipe_closes(verb, arguments)
    except KeyboardInterrupt as interrupt:
        number = stop.received()
        can_go_on = isinstance(interrupt, stop.Stopped) and interrupt.can_go_on
        if number is None and not isinstance(interrupt, stop.Stopped):
            raise
        what = str(interrupt) or f"stopped by {number.name if number else 'an interrupt'}"
        print(f"megatron-rl {verb}: {what}", file=sys.stderr)
        return stop.exit_code(number, can_go_on)


def _until_the_pipe_closes(verb: str, arguments: list[str]) -> int:
    if verb not in LISTINGS:
        return _run(verb, arguments)
    try:
        code = _run(verb, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(verb: str, arguments: list[str]) -> int:
    if verb == "--help":
        print(_overview())
        return 0 if arguments else REFUSED
    if verb == "--version":
        print(versions_line())
        return 0
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        print(f"megatron-rl: there is no verb {verb!r}; {hint}verbs: {', '.join(VERBS)}", file=sys.stderr)
        return REFUSED
    parser = _parser(verb)
    wrong = foreign_arguments(arguments[1:]) or _dashed_keys(parser, arguments[1:])
    if wrong:
        print(f"megatron-rl {verb}: {wrong}", file=sys.stderr)
        return REFUSED
    options = parser.parse_intermixed_args(arguments[1:])
    if verb == "keys":
        return _keys(options)
    if verb == "status":
        return _status(options)
    files, overrides = split_arguments([*options.config, *options.arguments])
    if not files and not overrides and not options.model:
        print(
            f"megatron-rl {verb}: give a config: megatron-rl {verb} CONFIG.yaml [key=value ...]",
            file=sys.stderr,
        )
        return REFUSED
    try:
        if verb == "plan":
            return _plan(files, overrides, options)
        if verb == "run" or (verb == "check" and any(is_pipeline(file) for file in files)):
            return _pipeline(verb, files, overrides)
        return _COMMANDS[verb](resolve(files, overrides, _PURPOSES.get(verb, "train")), options)
    except MegatronRLError as error:
        _print_refusal(verb, error, files, as_json=options.json)
        return REFUSED


def _dashed_keys(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str:
    """What is wrong with the first option that is really a setting; "" where there is none."""
    hints = [(argument, _dashed_key(parser, argument)) for argument in arguments]
    return next((f"{argument}: there is no such option -- {hint}" for argument, hint in hints if hint), "")


def _print_refusal(verb: str, error: MegatronRLError, files: Sequence[str], as_json: bool) -> None:
    if isinstance(error, ConfigError) and as_json:
        print(json.dumps({"ok": False, "faults": [asdict(fault) for fault in error.faults]}, indent=2, default=str))
    # Notes of several lines are tracebacks of ranks.
    notes = [note for note in vars(error).get("__notes__", []) if "\n" not in note]
    print("\n".join([f"megatron-rl {verb}: {error}", *notes]), file=sys.stderr)
    if isinstance(error, ConfigError):
        print("".join(_sources_of_missing_files(error.faults, files)), end="", file=sys.stderr)


def _sources_of_missing_files(faults: Sequence[Fault], files: Sequence[str]) -> Iterator[str]:
    """What config files say in their first comment, where files are missing that they name: how to come by those."""
    missing = [fault.reason for fault in faults if fault.reason.startswith("there is no such")]
    for file in files:
        if any(f"[set in {file}:" in reason for reason in missing) or (missing and is_pipeline(file)):
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            comment = list(takewhile(lambda line: line.startswith("#"), lines))
            if comment:
                yield f"{file} says:\n" + "".join(f"  {line.removeprefix('#').strip()}\n" for line in comment)


def _dashed_key(parser: argparse.ArgumentParser, argument: str) -> str:
    """What to write in place of an option that is really a setting (--actor.tp=2, --tp 2); "" where it is none."""
    name, _, value = argument.partition("=")
    if not name.startswith("--") or name == "--" or name in parser.format_usage() or name == "--help":
        return ""
    key, schema = name.removeprefix("--").replace("-", "_"), run_schema()
    meant = [key] if schema.key_of(key) else schema.suggest(key)
    if not meant:
        return ""
    written = [f"{name}={value or '...'}" for name in meant]
    return f"settings are written without dashes: {' or '.join(written)}"


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(config files, key=value overrides). An override begins with a name and has an '='; a path separator may stand
    in the user's own names below it (data.mix_weights.org/set=2).
    """
    overrides = [text for text in arguments if _is_override(text)]
    return [text for text in arguments if text not in overrides], overrides


def _is_override(text: str) -> bool:
    name = text.partition("=")[0]
    if text[:1] == "~" and "/" not in name:
        return not Path(text).exists()
    if "=" not in text or "/" not in name:
        return "=" in text
    return name.lstrip("+~").partition(".")[0].isidentifier() and not Path(text).exists()


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<8}{text}" for verb, text in VERBS.items())
    return (
        "megatron-rl VERB CONFIG.yaml [MORE.yaml ...] [key=value ...]\n\n"
        "Config files are merged from left to right, then come the overrides (actor.optim.lr=1e-6).\n\n"
        f"verbs:\n{verbs}\n\nmegatron-rl VERB --help shows the verb's options, "
        "megatron-rl --version the versions in use."
    )


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"megatron-rl {verb}", description=f"{verb}: {VERBS[verb]}", allow_abbrev=False
    )
    if verb == "keys":
        parser.add_argument("words", nargs="*", metavar="SECTION | WORD", help="only these; all keys when left out")
        parser.add_argument("--write", metavar="FILE.md", help="write the list of all keys as a page, docs/config.md")
        return parser
    if verb == "status":
        parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or a folder of such folders")
        parser.add_argument("--json", action="store_true", help="print one JSON list, for programs")
        return parser
    parser.set_defaults(model=None, json=False)
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG.yaml | key=value", help="config files, then single settings"
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="a config file, as above")
    if verb == "plan":
        keys = "\n".join(f"  {key:<42}{text}" for key, text in plan_request.KEYS.items())
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = f"keys with --model (a config has its own):\n{keys}"
        names = "a config.json, a folder with one, or a name as qwen2.5/7b"
        parser.add_argument("--model", metavar="MODEL", help=f"plan without a config: {names}")
        parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    if verb == "check":
        about = (
            "read data, tokenizer, template, rewards and headers of weights too, and show a row (takes as long as that)"
        )
        parser.add_argument("--data", action="store_true", help=about)
        about = "start Ray and look at every node and link of the run too: versions, GPUs, disks, clocks, speeds"
        parser.add_argument("--cluster", action="store_true", help=about)
        parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
        parser.add_argument("--flow", action="store_true", help="print the flow of a step too (imports torch)")
        parser.add_argument("--all", action="store_true", help="print every key, not only those that differ")
    if verb == "eval":
        name = "trainer.default_local_dir/trainer.experiment_name-eval"
        parser.add_argument("--out", metavar="DIR", help=f"folder for answers and scores; {name} when left out")
    if verb in ("eval", "export"):
        about = "a checkpoint, or a run with checkpoints: its model in place of the weights in model.path"
        parser.add_argument("--checkpoint", metavar="PATH", help=about)
    if verb == "export":
        parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not hold other files")
        about = "with LoRA: write the whole model with its adapter merged in; else the adapter is written"
        parser.add_argument("--merge", action="store_true", help=about)
    return parser


def _print_mapping(resolved: Resolved) -> None:
    if not resolved.mapped:
        return
    print("verl's keys, read as")
    print("\n".join(f"  {mapped}" for mapped in resolved.mapped))
    if resolved.accepted:
        print("\nverl's keys, accepted, no effect")
        print("\n".join(f"  {accepted}" for accepted in resolved.accepted))
    if resolved.differs:
        print("\ndifferent from verl")
        print("\n".join(f"  {differs}" for differs in resolved.differs))
    print()


def _check(resolved: Resolved, options: argparse.Namespace) -> int:
    cfg = resolved.config
    shape = read_actor_shape(cfg)
    batch, layout = batch_table(cfg), layout_table(cfg, shape)
    idle = [*idle_settings(cfg), *resolved.unused]
    if options.json:
        content = _as_json(resolved, batch, layout, [asdict(one) for one in idle])
        if options.flow:
            content["flow"] = _describe_flow(cfg)
        if options.data:
            lines, faults = _look_at_data(cfg, color=False)
            content |= {"ok": not faults, "data": lines, "data_faults": faults}
        if options.cluster:
            seen: list[str] = []
            _look_at_nodes(cfg, seen.append)
            content["nodes"] = seen
        print(json.dumps(content, indent=2))
        return 0 if content["ok"] else REFUSED
    _print_mapping(resolved)
    print("run" + ("" if options.all else " (keys that differ from their defaults; --all prints every key)"))
    print("\n".join(f"  {line}" for line in dump_yaml(cfg, only_changed=not options.all).splitlines()))
    print(f"\nbatch arithmetic\n{format_table(batch)}")
    print(f"\nlayout\n{format_table(layout)}")
    _print_idle(idle)
    if options.flow:
        print("\n".join(["\nflow of a step", *(f"  {line}" for line in _describe_flow(cfg))]))
    if options.cluster:
        print()
        _look_at_nodes(cfg, print)
    if not options.data:
        return 0
    lines, faults = _look_at_data(cfg, color=None)
    print("\n".join(["\ndata", *(f"  {line}" for line in lines)]))
    for fault in faults:
        print(f"megatron-rl check --data: {fault}", file=sys.stderr)
    return REFUSED if faults else 0


def _print_idle(idle: list[NoEffect]) -> None:
    if idle:
        print("\nchanged, and without effect in this run")
        print("\n".join(f"  {setting}" for setting in idle))


def _describe_flow(cfg: RunConfig) -> list[str]:
    """The flow of the run's algorithm, a line a node; nothing is started."""
    from megatron_rl.runs.trainer import Trainer

    return Trainer(cfg).flow.describe().splitlines()


def _look_at_data(cfg: RunConfig, color: bool | None) -> tuple[list[str], list[str]]:
    """(lines for a reader, faults) of everything that a run reads before its workers start."""
    from megatron_rl.runs import verbs

    findings = verbs.inspect(cfg, color)
    return findings.lines, findings.faults


def _look_at_nodes(cfg: RunConfig, tell: Callable[[str], None]) -> None:
    """Tell what is seen of the nodes, for a reader. ClusterError with every fault of theirs."""
    from megatron_rl.runs import verbs

    verbs.check_nodes_alone(cfg, tell)


def _as_json(
    resolved: Resolved, batch: list[TableRow], layout: list[TableRow], idle: list[dict[str, object]]
) -> dict[str, object]:
    keys = [
        {"key": key.name, "value": value, "default": key.default, "doc": key.doc}
        for key, value in settings_of(resolved.config)
    ]
    return {
        "ok": True,
        "config": to_dict(resolved.config),
        "batch": [asdict(row) for row in batch],
        "layout": [asdict(row) for row in layout],
        "idle": idle,
        "verl_mapped": [asdict(mapped) for mapped in resolved.mapped],
        "verl_accepted": [asdict(accepted) for accepted in resolved.accepted],
        "verl_differs": [asdict(differs) for differs in resolved.differs],
        "keys": keys,
    }


def _keys(options: argparse.Namespace) -> int:
    schema = run_schema()
    if options.write is not None:
        Path(options.write).write_text(as_markdown(schema), encoding="utf-8")
        print(f"wrote {options.write}: {len(schema.keys)} keys")
        return 0
    keys = find_keys(schema, options.words)
    if keys:
        print(list_of_keys(keys))
        return 0
    near = near_words(schema, options.words)
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections: {', '.join(sorted(schema.sections))}"
    print(f"megatron-rl keys: no key has {' '.join(options.words)!r} in its name or meaning -- {hint}", file=sys.stderr)
    return REFUSED


def _status(options: argparse.Namespace) -> int:
    """Runs that are dead or failed are no error of this verb: what it was asked is said."""
    from megatron_rl.runs import status

    now, reports, faults = time.time(), list[status.RunReport](), list[str]()
    for path in map(Path, options.runs):
        runs = status.runs_in(path)
        faults += [] if runs else [f"{path}: there is no run in this folder -- name a run's folder, or one of runs"]
        for run in runs:
            try:
                reports.append(status.report_run(run, now))
            except DataError as error:
                faults.append(str(error))
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    elif len(reports) == 1:
        print(status.as_text(reports[0], now))
    elif reports:
        print(status.as_table(reports, now))
    for fault in faults:
        print(f"megatron-rl status: {fault}", file=sys.stderr)
    return REFUSED if faults else 0


def _plan(files: list[str], overrides: list[str], options: argparse.Namespace) -> int:
    if options.model is not None:
        if files:
            cure = "leave out --model, or give settings as key=value"
            raise ConfigError([Fault("--model", options.model, f"stands beside the config {files[0]}", cure)])
        model, values = options.model, plan_request.parse(overrides)
    else:
        machine = [text for text in overrides if text.partition("=")[0] in plan_request.CONFIG_KEYS]
        config = resolve(files, [text for text in overrides if text not in machine]).config
        model, values = plan_request.settings_of(config)
        values |= plan_request.parse(machine)
    report = make_report(plan_request.request(model, values))
    print(json.dumps(as_json(report), indent=2) if options.json else as_text(report))
    return 0


def _pipeline(verb: str, files: list[str], overrides: list[str]) -> int:
    if len(files) != 1:
        raise ConfigError([Fault("PIPELINE.yaml", files, "is not one file", f"write megatron-rl {verb} PIPELINE.yaml")])
    pipeline = load_pipeline(files[0], overrides)
    if verb == "check":
        print("\n".join(["stages", *(f"  {line}" for line in pipeline.describe())]))
        return 0
    from megatron_rl.pipeline.run import run_pipeline

    return run_pipeline(pipeline, partial(print, flush=True))


def _train(resolved: Resolved, options: argparse.Namespace) -> int:
    from megatron_rl.runs import verbs

    _print_mapping(resolved)
    _print_idle([*idle_settings(resolved.config), *resolved.unused])
    verbs.train(resolved.config)
    return 0


def _eval(resolved: Resolved, options: argparse.Namespace) -> int:
    from megatron_rl.runs import verbs

    _print_mapping(resolved)
    verbs.evaluate(resolved.config, out=options.out, checkpoint=options.checkpoint)
    return 0


def _export(resolved: Resolved, options: argparse.Namespace) -> int:
    from megatron_rl.runs import verbs

    verbs.export(resolved.config, out=options.out, checkpoint=options.checkpoint, merge=options.merge)
    return 0


_PURPOSES: dict[str, Verb] = {"eval": "eval", "export": "export"}
_COMMANDS: dict[str, Callable[[Resolved, argparse.Namespace], int]] = {
    "check": _check,
    "train": _train,
    "eval": _eval,
    "export": _export,
}
