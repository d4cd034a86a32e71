"""`latbench doctor`: what this machine can measure, and what would disturb it."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the CPU, the engines that can be timed on it, GPUs, and what may disturb a measurement."""
    import json

    facts = _facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for heading, text in _lines(facts):
        table.add_row(heading, text)
    console = Console()
    console.print(table)
    for advice in facts["advice"]:
        console.print(f"! {advice}", highlight=False, soft_wrap=True)


def _facts() -> dict[str, Any]:
    """Everything found out, in plain values."""
    import time

    from latbench import backends, devices
    from latbench.backends import deepsparse_environment

    environment = devices.environment(devices.cores())
    before = devices.cpu_times()
    time.sleep(1.0)  # steal is a rate: look twice
    state = devices.telemetry(before)
    engines = {
        name: {"version": version, "missing": _missing(backends.BACKENDS[name][1])}
        for name, version in backends.available().items()
    }
    gpus, no_gpu = devices.gpus()
    facts = {
        "device": environment["device"],
        "environment": environment,
        "state": state,
        "backends": engines,
        "deepsparse": {"version": deepsparse_environment.version(), "refusal": deepsparse_environment.refusal()},
        "gpus": [{"name": gpu.name, "device": gpu.device} for gpu in gpus],
        "no_gpu": no_gpu,
    }
    return {**facts, "advice": _advice(facts)}


def _missing(packages: tuple[str, ...]) -> list[str]:
    from latbench import devices

    return [package for package in packages if devices.version(package) is None]


def _advice(facts: dict[str, Any]) -> list[str]:
    environment, state = facts["environment"], facts["state"]
    advice = []
    # One thread of load may be this command's own start.
    if state["load"] > 1 + environment["cores"] / 2:
        advice.append(f"the load is {state['load']:.1f} on {environment['cores']} cores: times will be too long")
    if (state["steal_fraction"] or 0) > 0.02:
        advice.append(f"the hypervisor takes {state['steal_fraction']:.0%} of the time: expect noise")
    if environment["governor"] not in (None, "performance"):
        advice.append(f"the clock governor is {environment['governor']}: performance gives steadier times")
    if environment["vector_bits"] is None:
        advice.append("the processor's vector instructions are unknown here")
    if "fma" not in environment["cpu_flags"] and environment["cpu_flags"] and "asimd" not in environment["cpu_flags"]:
        advice.append("no fused multiply-add: the kernels' speed on this processor says little about others")
    return advice


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    environment, state = facts["environment"], facts["state"]
    cache = ", ".join(
        f"{level.removesuffix('_bytes')} {environment[level] / 2**20:g} MiB"
        for level in ("l1d_bytes", "l2_bytes", "l3_bytes")
        if environment[level]
    )
    lines = [
        ("device", facts["device"]),
        ("processor", environment["cpu_model"] or "hidden"),
        ("cores, threads used", str(environment["cores"])),
        ("vectors", f"{environment['vector_bits']} bits: {environment['cpu_flags']}"),
        ("caches", cache or "hidden"),
        ("memory", f"{environment['memory_bytes'] / 2**30:.1f} GiB"),
        ("clock governor", environment["governor"] or "hidden"),
        ("clock", f"{state['clock_hertz'] / 1e9:.2f} GHz" if state["clock_hertz"] else "hidden"),
        ("load, stolen time", f"{state['load']:.2f}, {_percent(state['steal_fraction'])}"),
    ]
    for name, engine in facts["backends"].items():
        missing = f"missing: pip install {' '.join(engine['missing'])}" if engine["missing"] else ""
        lines.append((f"backend {name}", missing or engine["version"]))
    deepsparse = facts["deepsparse"]
    ready = f"{deepsparse['version']}, for evaluation only" if deepsparse["version"] else None
    lines.append(("backend deepsparse", deepsparse["refusal"] or ready or "missing: latbench setup deepsparse"))
    found = ", ".join(f"{gpu['name']} ({gpu['device']})" for gpu in facts["gpus"])
    lines.append(("GPUs", found or f"none: {facts['no_gpu']}"))
    return lines


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{fraction:.1%}"
