"""The command ``moe-layer``: arguments in, one-line errors out; the work is done in the modules it calls.

A mistake of the user (bad arguments, a damaged checkpoint, a missing file) ends with ``error: …`` on stderr and exit
code 2. A result beyond its error limit (``demo``, ``run --check``) ends with exit code 1. Anything else is a fault of
the library and keeps its traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from moe_layer.errors import MoELayerError

OK, BEYOND_LIMIT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
ACTIVATION_FORMATS = ("fp32", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4")

DESCRIPTION = """\
A Mixture-of-Experts layer for inference with expert parallelism (EP): reads the experts of DeepSeek- and Kimi-family
checkpoints and runs dispatch, expert GEMMs and combine over the ranks of a group."""

EPILOG = """\
start here:
  moe-layer doctor                 what this machine can run, and why not
  moe-layer demo                   the whole path on this machine, with a table of error and time
  moe-layer inspect CHECKPOINT     what a checkpoint holds and what a rank will load

exit codes: 0 done, 1 a result beyond its error limit, 2 a mistake in the arguments or the files."""

DEMO = """\
Writes a small checkpoint in each of three release layouts (DeepSeek-V3 FP8, DeepSeek-V4.1-Flash FP4, Kimi-K3 MXFP4
with a latent MoE), starts one process a rank on this machine, loads one layer of each with expert parallelism, runs
tokens of different counts per rank (the last rank has none) and compares every output row with an fp64 oracle that
shares no code with the layer. Sizes are reduced; scale blocks, tensor names and routing are those of the releases.
A GPU is used where there is one."""

DEMO_EXAMPLES = """\
examples:
  moe-layer demo                               four ranks, three models
  moe-layer demo --ep 2 --model deepseek_v3    two ranks, one model
  moe-layer demo --json | python -m json.tool  the table for a program

Exit code 1 if a relative L2 error exceeds its limit (5.7e-3)."""

RUN = """\
Loads one MoE layer of a checkpoint, runs it on the tokens of a safetensors file and prints the time of each run.
--check adds the error against an fp64 oracle that reads the checkpoint by itself; it is slow.

The input file holds `hidden_states` [T, hidden] (BF16, FP16 or FP32), and `input_ids` [T] for a layer that chooses
experts by token id. The output file holds `hidden_states` of the same shape and dtype."""

RUN_EXAMPLES = """\
examples:
  moe-layer run DeepSeek-V3 --layer 3 --input x.safetensors --output y.safetensors
  moe-layer run DeepSeek-V3 --layer 3 --input x.safetensors --check
  moe-layer run Kimi-K3 --layer 1 --random 64 --check         64 random tokens instead of a file
  torchrun --nproc-per-node 4 --no-python moe-layer run DeepSeek-V3 --layer 3 --input x.safetensors

Under torchrun the experts are split over all processes. Each loads its own experts and takes its share of the tokens
(rank r of P the rows from r·T/P to (r+1)·T/P); rank 0 prints and writes the output.
Exit code 1 if --check finds a relative L2 error above its limit (5.7e-3)."""

INSPECT = """\
Reads a checkpoint's config and the headers of its safetensors files, no tensor data: the model's MoE layers, the format
that its experts are stored in, the bytes that a rank will load, and what is missing or does not fit."""

INSPECT_EXAMPLES = """\
examples:
  moe-layer inspect DeepSeek-V3                 the whole checkpoint, as eight ranks would load it
  moe-layer inspect DeepSeek-V3 --layer 3 --ep 32
  moe-layer inspect DeepSeek-V3 --json | jq .missing

Exit code 1 if tensors are missing or mis-shaped."""

DOCTOR = """\
Says what this machine can run and why not: versions, GPUs and their peer access, transports, the number formats each
compute backend serves, and the bytes of each communication region for a model. What cannot run here comes with what
runs instead."""

DOCTOR_EXAMPLES = """\
examples:
  moe-layer doctor
  moe-layer doctor --model kimi_k3 --ep 16 --tokens 1024       the workspaces of another model and group
  moe-layer doctor --model path/to/checkpoint
  moe-layer doctor --json | jq .transports"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as all errors of the command are."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(USER_ERROR)


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def build_parser() -> Parser:
    """The parser of the command and its subcommands. Imports neither torch nor what the commands need."""
    from moe_layer import __version__, cli_bench, cli_compile, cli_report

    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="moe-layer", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"moe-layer {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def command(name: str, handler: Any, summary: str, text: str, examples: str) -> Parser:
        sub = commands.add_parser(name, help=summary, description=text, epilog=examples, formatter_class=raw)
        sub.set_defaults(handler=handler)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        return sub

    demo = command("demo", _demo, "the whole path on this machine, with a table of error and time", DEMO, DEMO_EXAMPLES)
    demo.add_argument("--ep", type=positive, default=4, metavar="P", help="ranks, one process each (default: 4)")
    demo.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="deepseek_v3, deepseek_v41 or kimi_k3; repeatable (default: all)",
    )
    demo.add_argument("--tokens", type=positive, default=48, metavar="T", help="tokens of rank 0 (default: 48)")
    demo.add_argument("--hidden", type=positive, default=None, metavar="H", help="hidden size, a multiple of 256")
    demo.add_argument("--seed", type=int, default=0, help="of weights and tokens (default: 0)")
    demo.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is a GPU)")

    run = command("run", _run, "a checkpoint's layer on a tensor file", RUN, RUN_EXAMPLES)
    run.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder: config.json and safetensors files")
    run.add_argument("--layer", type=int, required=True, metavar="N", help="number of the decoder layer")
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", metavar="FILE", help="safetensors file with hidden_states [T, hidden]")
    source.add_argument("--random", type=positive, metavar="T", help="T tokens drawn from a normal distribution, BF16")
    run.add_argument("--output", metavar="FILE", help="write the result and the routing here, as safetensors")
    run.add_argument("--check", action="store_true", help="compare with the fp64 oracle")
    run.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="timed runs after one warm-up (default: 3)"
    )
    run.add_argument(
        "--activation-format",
        choices=ACTIVATION_FORMATS,
        help="what activations are quantized to (default: what the checkpoint implies)",
    )
    run.add_argument(
        "--quantize-at",
        choices=("source", "target"),
        default="source",
        help="quantize tokens before dispatch, or send them in BF16 and quantize on arrival (default: source)",
    )
    run.add_argument(
        "--protocol", default="auto", help="transport between ranks (default: auto; see `moe-layer doctor`)"
    )
    run.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is a GPU)")
    run.add_argument("--seed", type=int, default=0, help="of --random (default: 0)")

    inspect = command(
        "inspect", _inspect, "what a checkpoint holds and what a rank will load", INSPECT, INSPECT_EXAMPLES
    )
    inspect.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint folder: config.json and safetensors files"
    )
    inspect.add_argument("--layer", type=int, default=None, metavar="N", help="this decoder layer only (default: all)")
    inspect.add_argument(
        "--ep", type=positive, default=8, metavar="P", help="ranks to split the experts over (default: 8)"
    )

    doctor = command("doctor", _doctor, "what this machine can run, and why not", DOCTOR, DOCTOR_EXAMPLES)
    doctor.add_argument(
        "--model",
        default="deepseek_v41",
        help="whose workspaces to size: a known name or a checkpoint (default: deepseek_v41)",
    )
    doctor.add_argument("--ep", type=positive, default=8, metavar="P", help="ranks of the group (default: 8)")
    doctor.add_argument(
        "--tokens",
        type=positive,
        default=4096,
        metavar="T",
        help="the most tokens a rank dispatches in a step (default: 4096)",
    )
    doctor.add_argument(
        "--activation-format", choices=ACTIVATION_FORMATS, help="payload of dispatch (default: what the model implies)"
    )
    for module in (cli_bench, cli_report, cli_compile):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; default: those of the process.

    Returns:
        The exit code.
    """
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
        if not hasattr(arguments, "handler"):
            parser.print_help()
            return USER_ERROR
        code = arguments.handler(arguments)
        sys.stdout.flush()
        return code
    except (MoELayerError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # The reader of our output (head, less) went away: not an error, but Python would report one at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED


def print_json(report: Mapping[str, Any]) -> None:
    print(json.dumps(report, indent=2))


def _demo(arguments: argparse.Namespace) -> int:
    from moe_layer import demo

    report = demo.run_demo(
        models=arguments.model or demo.MODELS,
        ep_size=arguments.ep,
        tokens=arguments.tokens,
        hidden_size=arguments.hidden,
        seed=arguments.seed,
        device=arguments.device,
        progress=not arguments.json,
    )
    if arguments.json:
        print_json(report)
    else:
        demo.print_report(report)
    return OK if report["ok"] else BEYOND_LIMIT


def _run(arguments: argparse.Namespace) -> int:
    from moe_layer import run

    report = run.run_layer(
        arguments.checkpoint,
        arguments.layer,
        input_file=arguments.input,
        random_tokens=arguments.random,
        output_file=arguments.output,
        check=arguments.check,
        repeat=arguments.repeat,
        activation_format=arguments.activation_format,
        quantize_at=arguments.quantize_at,
        protocol=arguments.protocol,
        device=arguments.device,
        seed=arguments.seed,
    )
    if report is None:  # not rank 0
        return OK
    if arguments.json:
        print_json(report)
    else:
        run.print_report(report)
    return OK if report["ok"] else BEYOND_LIMIT


def _inspect(arguments: argparse.Namespace) -> int:
    from moe_layer.models import inspect

    report = inspect.inspect_checkpoint(arguments.checkpoint, layer=arguments.layer, ep_size=arguments.ep)
    if arguments.json:
        print_json(report)
    else:
        inspect.print_report(report)
    return OK if report["ok"] else BEYOND_LIMIT


def _doctor(arguments: argparse.Namespace) -> int:
    from moe_layer import doctor

    report = doctor.diagnose(
        model=arguments.model,
        ep_size=arguments.ep,
        max_tokens_per_rank=arguments.tokens,
        activation_format=arguments.activation_format,
    )
    if arguments.json:
        print_json(report)
    else:
        doctor.print_report(report)
    return OK


if __name__ == "__main__":
    raise SystemExit(main())
