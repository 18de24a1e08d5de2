"""The command line of the development cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys

from tools.devcluster import cluster, controlplane, debian, gobuild, images
from tools.devcluster.layout import NODES, Layout
from tools.devcluster.process import CommandError

_PASSED_ON = ("kubectl", "helm", "buildah")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.devcluster", description="Kubernetes on this machine")
    parser.add_argument("--name", default="dev", help="name of the cluster's state folder")
    parser.add_argument("--port", type=int, default=16443, help="first of 20 ports on 127.0.0.1")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the cluster, or its missing parts")
    up.add_argument("--nodes", type=int, default=NODES)
    up.add_argument("--gpus", type=int, default=8, help="number of counted nvidia.com/gpu on each node")
    up.add_argument("--control-plane-only", action="store_true", help="start no nodes; needs no root")
    up.add_argument(
        "--no-controllers", action="store_true", help="with --control-plane-only: start only etcd and the API server"
    )
    add = commands.add_parser("add-node", help="start another node")
    add.add_argument("--gpus", type=int, default=8)
    down = commands.add_parser("down", help="stop the cluster and remove everything except the cache")
    down.add_argument("--purge", action="store_true", help="also remove pulled and pushed images")
    commands.add_parser("status", help="show what runs")
    programs = commands.add_parser(
        "programs", help="build or unpack the programs that tests run; takes minutes the first time"
    )
    programs.add_argument("--nodes", action="store_true", help="also those that nodes need")
    build = commands.add_parser("images", help="build and push the project's images; print their references as JSON")
    build.add_argument(
        "targets",
        nargs="*",
        default=list(images.TARGETS),
        metavar="TARGET",
        help=f"any of {', '.join(images.TARGETS)}; default: all",
    )
    for program in _PASSED_ON:
        commands.add_parser(program, help=f"run {program} on the cluster with the remaining arguments")
    return parser


def main() -> int:
    """Run one command. A failure prints one message on stderr and returns exit code 1."""
    ours, theirs = _split(sys.argv[1:])
    options = _parser().parse_args(ours)
    layout = Layout(name=options.name, port=options.port)
    try:
        return _dispatch(options, layout, theirs)
    except (CommandError, TimeoutError) as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line into our arguments and those of kubectl, helm or buildah."""
    for index, word in enumerate(arguments):
        if word in _PASSED_ON:
            return arguments[: index + 1], arguments[index + 1 :]
    return arguments, []


def _dispatch(options: argparse.Namespace, layout: Layout, theirs: list[str]) -> int:
    match options.command:
        case "up" if options.control_plane_only:
            cluster.up_control_plane(layout, controllers=not options.no_controllers)
            print(f"export KUBECONFIG={layout.kubeconfig}")
        case "up":
            cluster.up(layout, nodes=options.nodes, gpus=options.gpus)
            print(f"export KUBECONFIG={layout.kubeconfig}")
        case "add-node":
            print(f"node{cluster.add_node(layout, gpus=options.gpus)}")
        case "down":
            cluster.down(layout, purge=options.purge)
        case "programs":
            cluster.obtain(layout, nodes=options.nodes)
        case "status":
            print(cluster.status(layout))
        case "images":
            print(json.dumps(images.publish(layout, tuple(options.targets)), indent=1))
        case "kubectl":
            command = controlplane.kubectl_command(layout)
            os.execv(command[0], [*command, *theirs])
        case "helm":
            helm = str(gobuild.helm())
            os.execve(helm, [helm, *theirs], os.environ | {"KUBECONFIG": str(layout.kubeconfig)})
        case "buildah":
            images.obtain()
            word, *arguments = theirs or ["--help"]
            command = [str(part) for part in images.command(word, *arguments)]
            os.execve(command[0], command, debian.environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
