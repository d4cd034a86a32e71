"""`latbench plan`: what a sweep would measure, how long it would take and how much disk."""

from __future__ import annotations

from typing import Annotated

import typer

from latbench.commands.sweep import ADAPTIVE_HELP, BACKENDS_HELP, cpu_backends, duration


def plan(
    workload: Annotated[list[str] | None, typer.Option(help="A bundled workload or a YAML file; repeat it.")] = None,
    patterns: Annotated[list[str] | None, typer.Option(help="Such as dense,vector:32,nm:2:4.")] = None,
    sparsities: Annotated[list[str] | None, typer.Option(help="Such as 0.5,0.75,0.9.")] = None,
    backends: Annotated[list[str] | None, typer.Option(help=BACKENDS_HELP)] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; by default all cores.")] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help=ADAPTIVE_HELP)] = False,
    tune: Annotated[bool, typer.Option("--tune", help="With our own CPU kernels found by trying a few.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the points that a sweep of this CPU would measure, the time and the disk it would take."""
    import json
    from collections import Counter

    from rich.console import Console
    from rich.table import Table

    from cost_models import Adaptive
    from latbench import devices, workloads
    from latbench import plan as planning
    from latbench.backends import available

    device, threads = devices.cpu_device(), threads or devices.cores()
    names = workload or workloads.bundled()
    engines = cpu_backends(backends or [])

    def select(chosen: list[str]) -> list[planning.Point]:
        points = planning.select(
            chosen, patterns or [], sparsities or [], device=device, threads=threads, backends=engines,
            tune=tune, usual=planning.FINE_SPARSITIES if adaptive else planning.SPARSITIES,
        )  # fmt: skip
        return Adaptive(points).anchors if adaptive else points

    every = select(names)
    each = {name: select([name]) for name in names}
    seconds, size = planning.estimated_seconds(every), planning.estimated_bytes(every)
    if as_json:
        document = {
            "device": device,
            "threads": threads,
            "backends": {name: version for name, version in available().items() if name in engines},
            "points": len(every),
            "shapes": len({point.shape for point in every}),
            "estimated_seconds": round(seconds),
            "estimated_bytes": size,
            "patterns": dict(Counter(str(point.pattern) for point in every)),
            "workloads": {
                name: {"points": len(points), "shapes": len({point.shape for point in points})}
                for name, points in each.items()
            },
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("workload", "shapes", "points", "about"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for name, points in each.items():
        shapes = len({point.shape for point in points})
        table.add_row(str(name), str(shapes), str(len(points)), duration(planning.estimated_seconds(points)))
    if len(each) > 1:
        distinct = len({point.shape for point in every})
        table.add_row("all, equal shapes once", str(distinct), str(len(every)), duration(seconds))
    console = Console()
    console.print(table)
    console.print(
        f"\non {device} with {threads} threads: {', '.join(engines)}; about {duration(seconds)} and "
        f"{size / 1e6:.1f} MB of disk" + (" for the anchors; then what the time budget allows" if adaptive else ""),
        highlight=False,
        soft_wrap=True,
    )
