"""``moe-layer bench layer``."""

from __future__ import annotations

import argparse
from typing import Any

from moe_layer.cli_types import RAW, at_least, many, names, positive

LAYER = """\
Times the routed experts' layer: quantize, dispatch, index, FC1, FC2, finalize, combine, as one CUDA graph of 10 warm-up
and 100 timed layers back to back; the largest of the ranks' times, the median over replays. Stages come from CUPTI
kernel records of replays in separate processes. Some tokens are compared with fp64. Beside each time stands its floor,
from rates measured in the same run. With --protocol none one GPU does the work of one rank of --ranks, without the
all-to-all. On a machine without GPUs a small layer is timed by the clock; those numbers mean nothing for GPUs."""

LAYER_EXAMPLES = """\
examples:
  moe-layer bench layer                                             V4.1-Flash and Kimi-K3 on all GPUs
  moe-layer bench layer --protocol none --ranks 8 --json l.json     one rank of eight, on one GPU
  moe-layer bench layer --model deepseek_v4:fp8:fp8 --protocol fence,sentinel --tokens 1,128,4096
  moe-layer bench layer --routing uniform,zipf:0.5,zipf:1,zipf:1.25 --tokens 1,1024 --peer megamoe
  moe-layer bench layer --routing trace:ids.safetensors --tokens 256

A model is a name, NAME:ACTIVATIONS, NAME:ACTIVATIONS:WEIGHTS or a checkpoint. A trace is a safetensors file with
topk_ids [tokens, top_k], the selections of real tokens, such as `moe-layer run … --output FILE` writes. A case that
fails prints its error, and the run goes on; exit code 1 says so. Under torchrun its processes are the ranks, and
the first prints."""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    layer = commands.add_parser(
        "layer", help="whole layers", description=LAYER, epilog=LAYER_EXAMPLES, formatter_class=RAW
    )
    layer.set_defaults(handler=_bench_layer)
    layer.add_argument(
        "--model", type=names, default=(), metavar="NAME[:FORMAT[:WEIGHTS]],…",
        help="(default: deepseek_v41,kimi_k3; on the CPU the first; models known by name have few small experts there)",
    )  # fmt: skip
    layer.add_argument(
        "--tokens", type=many(positive), default=(), metavar="T,…",
        help="tokens on each rank (default: 1,16,128,1024,4096; on the CPU 1,8)",
    )  # fmt: skip
    layer.add_argument(
        "--protocol", type=names, default=(), metavar="NAME,…",
        help="sentinel, fence, auto, collective, loopback, or none (default: sentinel,fence; one GPU: none; CPU: "
        "collective)",
    )  # fmt: skip
    layer.add_argument("--peer", type=names, default=(), metavar="NAME,…", help="others: megamoe, vllm, sglang, all")
    layer.add_argument("--ranks", type=positive, metavar="P", help="(default: as many as GPUs; with none 8; CPU: 2)")
    layer.add_argument(
        "--routing", type=names, default=("perfect",), metavar="KIND,…",
        help="perfect, uniform, zipf:ALPHA, trace:FILE (default: perfect)",
    )  # fmt: skip
    layer.add_argument(
        "--quantize-at", choices=("source", "target"), default="source", help="before dispatch or on arrival"
    )
    layer.add_argument("--route", action="store_true", help="with the router's kernels in each step")
    layer.add_argument(
        "--launch", choices=("auto", "process", "single"), default="auto",
        help="a process a rank, or one process for all (default: auto)",
    )  # fmt: skip
    layer.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)")
    layer.add_argument(
        "--warmup", type=at_least(0), metavar="N", help="untimed layers of a graph (default: 10; CPU: 1)"
    )
    layer.add_argument("--steps", type=positive, metavar="N", help="timed layers of a graph (default: 100; CPU: 3)")
    layer.add_argument("--repeats", type=positive, metavar="N", help="timed replays (default: 10; CPU: 3)")
    layer.add_argument(
        "--l2-flush", action="store_true", help="flush the L2 cache before each layer, its own time taken out"
    )
    layer.add_argument("--no-stages", action="store_true", help="whole layers only, no second set of processes")
    layer.add_argument("--seed", type=at_least(0), default=0, help="of routing, values and weights (default: 0)")
    layer.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured; - for stdout")


def _bench_layer(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import layer, show
    from moe_layer.benchmarks.harness import Options
    from moe_layer.benchmarks.peers import chosen
    from moe_layer.benchmarks.report.layer import sections
    from moe_layer.benchmarks.routing import Routing
    from moe_layer.benchmarks.shapes import SHAPES, get_shape

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = (arguments.device or ("cuda" if gpus else "cpu")) == "cuda"
    default = Options() if gpu else layer.CPU_OPTIONS

    if gpu:
        protocols = ("sentinel", "fence") if gpus > 1 else ("none",)
    else:
        protocols = ("loopback",) if arguments.ranks == 1 else ("collective",)
    shapes = tuple(get_shape(name) for name in arguments.model or (layer.MODELS if gpu else layer.MODELS[:1]))
    if not gpu:
        shapes = tuple(layer.reduced(shape) if shape.name in SHAPES else shape for shape in shapes)
    plan = layer.Plan(
        shapes=shapes,
        tokens=arguments.tokens or (layer.TOKENS if gpu else (1, 8)),
        protocols=(*(arguments.protocol or protocols), *chosen("layer", arguments.peer)),
        routings=tuple(Routing.parse(kind) for kind in arguments.routing),
        ranks=arguments.ranks,
        launch=arguments.launch,
        device_type=arguments.device,
        options=default.but(arguments.warmup, arguments.steps, arguments.repeats, l2_flush=arguments.l2_flush),
        stages=not arguments.no_stages,
        seed=arguments.seed,
        quantize_at=arguments.quantize_at,
        route=arguments.route,
    )
    with layer.LayerBench(plan) as bench:
        return show.run(bench, sections, json_file=arguments.json)[0]
