"""`latbench doctor`: the devices and engines of this machine, and what would disturb measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latbench.cli.json_output import print_json
from latbench.cli.options.common_options import Json

if TYPE_CHECKING:
    from latbench.machines.gpu_names import Gpu

STEAL_SECONDS = 1.0  # between two readings of stolen time, which is a rate


def doctor(as_json: Json = False) -> None:
    """Show the CPU, the GPUs, the engines that can be timed, and what to change for less noise."""
    facts = _find_facts()
    if as_json:
        print_json(facts)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in _lines(facts):
        table.add_row(heading, text)
    console = Console(markup=False)  # [cuda13] in an advice is no markup
    console.print(table)
    if not facts["advice"]:
        console.print("nothing was found that would disturb a measurement")
    for advice in facts["advice"]:
        console.print(f"! {advice}", highlight=False, soft_wrap=True)


def _find_facts() -> dict[str, Any]:
    """Return everything that is known of this machine, in plain values."""
    import time
    from dataclasses import asdict

    from latbench.backends import installed_engines
    from latbench.backends.cpu import deepsparse_environment
    from latbench.base.engine_registry import CPU_ENGINES
    from latbench.base.files import find_cache_folder
    from latbench.machines.devices import describe_cpu_environment, read_cpu_times, read_telemetry
    from latbench.machines.gpu_discovery import list_gpus
    from latbench.machines.gpu_names import format_option
    from latbench.machines.noise_sources import list_advice, read_host
    from latbench.machines.processors import count_cores
    from latbench.runners.device_lock import find_lock_folder

    environment = describe_cpu_environment(count_cores())
    before = read_cpu_times()
    time.sleep(STEAL_SECONDS)
    host = read_host(read_telemetry(before)["steal_fraction"])
    engines = {
        name: {
            "version": version,
            "missing": [group[0] for group in installed_engines.list_missing_groups(CPU_ENGINES[name])],
        }
        for name, version in installed_engines.list_cpu_versions().items()
    }
    gpus, no_gpu = list_gpus()
    facts = {
        "device": environment["device"],
        "environment": environment,
        "ceilings": _ceilings(environment),
        "host": asdict(host),
        "backends": engines,
        "deepsparse": {
            "version": deepsparse_environment.find_deepsparse_version(),
            "refusal": deepsparse_environment.explain_refusal(),
        },
        "gpus": [
            {"index": index, "option": format_option(gpus, index), **_gpu(gpu)} for index, gpu in enumerate(gpus)
        ],
        "no_gpu": no_gpu,
        "gpu_backends": _gpu_backends(),
        "lock_folder": str(find_lock_folder()),
        "cache_folder": str(find_cache_folder()),
    }
    disturbed = [*list_advice(host), *_lock_advice(host.container)]
    unknown = [*_unknown_vectors(environment), *_hidden_name(environment["device"], host.virtual)]
    return {**facts, "advice": [*unknown, *disturbed, *_gpu_advice(facts)]}


def _lock_advice(container: bool) -> list[str]:
    """Advise containers of one machine to share the folder of the lock, which is how they see each other."""
    import os

    from latbench.runners.device_lock import FOLDER_VARIABLE, find_lock_folder

    if not container or os.environ.get(FOLDER_VARIABLE):
        return []
    return [
        f"this is a container: sweeps in other containers do not see its lock in {find_lock_folder()}, and "
        f"would measure at the same time; mount one folder into all of them and name it in {FOLDER_VARIABLE}"
    ]


def _gpu_backends() -> dict[str, dict[str, Any]]:
    """Return for each GPU engine its version, and the packages of which one has to be installed."""
    from latbench.backends import installed_engines
    from latbench.base.engine_registry import GPU_ENGINES

    missing = {name: installed_engines.list_missing_groups(engine) for name, engine in GPU_ENGINES.items()}
    return {
        name: {"version": version, "missing": list(missing[name][0]) if missing[name] else []}
        for name, version in installed_engines.list_gpu_versions().items()
    }


def _ceilings(environment: dict[str, Any]) -> dict[str, Any] | None:
    """Return the roofline of this CPU with all its cores; None where no sweep has measured it."""
    from dataclasses import asdict

    from latbench.backends.cpu import cpu_reference
    from latbench.machines.ceilings import CachedCeilings, Ceilings

    known = CachedCeilings[Ceilings](
        environment["device"], environment["threads"], cpu_reference.WORK, _unmeasured
    ).known()
    return None if known is None else asdict(known)


def _unmeasured() -> Any:
    raise AssertionError("doctor shows stored ceilings and measures nothing")


def _gpu(gpu: Gpu) -> dict[str, Any]:
    """Return the state of a GPU, and its roofline where a sweep has measured it."""
    from dataclasses import asdict

    from latbench.machines.nvml import describe_gpu_environment
    from latbench.sweeping.gpu_roofline import build_cached_gpu_ceilings

    known = build_cached_gpu_ceilings(describe_gpu_environment(gpu), _unmeasured).known()
    ceilings = None if known is None else asdict(known)
    return {"name": gpu.name, "device": gpu.device, **_gpu_state(gpu.uuid), "ceilings": ceilings}


def _gpu_state(uuid: str) -> dict[str, Any]:
    """Return driver, limits, clocks, power and temperature of a GPU; a MIG slice hides some of them."""
    from latbench.machines.nvml import open_observer

    with open_observer(uuid) as observer:
        state = observer()
        return {
            **observer.facts(),
            **observer.setting(),
            "clock_hertz": state.clock_hertz,
            "power_watts": state.power_watts,
            "temperature_celsius": state.temperature_celsius,
            "event_reasons": sorted(state.reasons),
        }


def _unknown_vectors(environment: dict[str, Any]) -> list[str]:
    """Say that vector instructions are unknown, or multiply-adds missing."""
    flags = environment["cpu_flags"].split()
    if environment["vector_bits"] is None:
        return ["the processor's vector instructions are unknown here: kernels for the narrowest are used"]
    if not {"fma", "asimd"} & set(flags):
        return ["this processor has no fused multiply-add, so its times do not represent others: use a newer one"]
    return []


def _hidden_name(device: str, virtual: bool | None) -> list[str]:
    """Warn that different processors may share a name where the hypervisor hides the real one."""
    if not virtual or "-model-" not in device:
        return []
    return [
        f"the hypervisor hides the processor's name, so others may have the name {device}: keep their tables apart"
    ]


def _gpu_advice(facts: dict[str, Any]) -> list[str]:
    """Say what slows the GPUs down or disturbs them, and what to do."""
    from latbench.machines.nvml import THROTTLING

    one = len(facts["gpus"]) == 1
    named = [(gpu["name"] if one else f"GPU {gpu['index']}, {gpu['name']}", gpu) for gpu in facts["gpus"]]
    advice = [
        f"{name} is slowed down now ({', '.join(sorted(reasons))}): let it cool, or end other programs on it"
        for name, gpu in named if (reasons := THROTTLING.intersection(gpu["event_reasons"]))
    ]  # fmt: skip
    for name, gpu in named:
        advice += [f"{name}: {sentence}" for sentence in _for_a_quieter(gpu)]
    if facts["gpus"] and not any(backend["version"] for backend in facts["gpu_backends"].values()):
        advice.append("no engine for GPUs is installed: pip install 'latbench[cuda13]', or cuda12 for older drivers")
    return advice


def _for_a_quieter(gpu: dict[str, Any]) -> list[str]:
    """Say what to change on a GPU, half a sentence each."""
    found = []
    if gpu["processes"]:
        found.append(f"{gpu['processes']} processes compute on it now: end them, because they disturb measurements")
    if gpu["persistence"] is False:
        found.append("the driver unloads its state when no program uses it: sudo nvidia-smi -pm 1 keeps it")
    limit, usual = gpu["gpu_power_limit_milliwatts"], gpu["usual_power_limit_milliwatts"]
    if limit and usual and limit < usual:
        found.append(
            f"its power limit is {limit / 1e3:.0f} W instead of {usual / 1e3:.0f} W, so it slows down earlier: "
            f"sudo nvidia-smi -pl {usual / 1e3:.0f}"
        )
    if clock := gpu["gpu_application_clock_hertz"] or gpu["gpu_max_clock_hertz"]:
        found.append(
            f"its clock varies with heat and power: sudo nvidia-smi -lgc {clock / 1e6:.0f}, or a lower clock that "
            "the power limit sustains, fixes it; -rgc undoes that"
        )
    return found


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return every fact as a heading and a text."""
    return [*_machine_lines(facts), *_cpu_engine_lines(facts), *_gpu_lines(facts)]


def _machine_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from latbench.base.number_format import format_bytes

    environment, host = facts["environment"], facts["host"]
    cache = ", ".join(
        f"{level.removesuffix('_bytes')} {format_bytes(environment[level])}"
        for level in ("l1d_bytes", "l2_bytes", "l3_bytes")
        if environment[level]
    )
    quota = f", a quota of {host['quota_cores']:g}" if host["quota_cores"] is not None else ""
    if host["granted_by_slurm"] is not None:
        quota += f", {host['granted_by_slurm']} granted by Slurm"
    turbo = {True: "on", False: "off", None: "hidden"}[host["turbo"]]
    most = f", at most {host['most_clock_hertz'] / 1e9:.2f}" if host["most_clock_hertz"] else ""
    nominal = " nominal, the real one is hidden" if host["virtual"] and not environment["governor"] else ""
    kind = (", a virtual machine" if host["virtual"] else "") + (", in a container" if host["container"] else "")
    return [
        ("device", facts["device"] + kind),
        ("processor", environment["cpu_model"] or "hidden"),
        ("cores, hardware threads", f"{host['cores']}, {host['processors']}{quota}"),
        ("threads used", str(environment["cores"])),
        ("vectors", f"{environment['vector_bits']} bits: {environment['cpu_flags']}"),
        ("caches", cache or "hidden"),
        ("cold weights", _cold_weights()),
        ("memory", format_bytes(environment["memory_bytes"])),
        ("clock", f"{host['clock_hertz'] / 1e9:.2f} GHz{most or nominal}" if host["clock_hertz"] else "hidden"),
        ("clock governor, turbo", f"{environment['governor'] or 'hidden'}, {turbo}"),
        ("roofline", _roofline(facts["ceilings"])),
        ("device lock", f"in {facts['lock_folder']}"),
        ("cache", f"in {facts['cache_folder']}, which LATBENCH_CACHE moves"),
        ("load, stolen time", f"{_or_unknown(host['load'], '.2f')}, {_or_unknown(host['steal_fraction'], '.1%')}"),
    ]


def _cpu_engine_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, engine in facts["backends"].items():
        missing = f"missing: pip install {' '.join(engine['missing'])}" if engine["missing"] else ""
        lines.append((f"backend {name}", missing or engine["version"]))
    deepsparse = facts["deepsparse"]
    ready = f"{deepsparse['version']}, for evaluation only" if deepsparse["version"] else None
    lines.append(("backend deepsparse", deepsparse["refusal"] or ready or "missing: latbench setup deepsparse"))
    return lines


def _gpu_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from latbench.backends.gpu import gpu_installation

    lines = []
    for gpu in facts["gpus"]:
        lines += [
            (f"GPU {gpu['index']}, {gpu['name']}", _gpu_line(gpu)),
            ("  to measure it", f"latbench sweep --gpu {gpu['option']}"),
            ("  its roofline", _roofline(gpu["ceilings"])),
        ]
    first = facts["gpus"][0] if facts["gpus"] else {"cuda_driver": None, "compute_capability": None}
    extra = f"latbench[{gpu_installation.find_extra(first['cuda_driver'], first['compute_capability'])}]"
    if not facts["gpus"]:
        lines.append(("GPUs", f"none: {facts['no_gpu']}"))
    for name, engine in facts["gpu_backends"].items():
        missing = f"missing {' or '.join(engine['missing'][:2])}: pip install '{extra}'" if engine["missing"] else ""
        idle = "" if facts["gpus"] else ", without a GPU"
        lines.append((f"GPU backend {name}", missing or f"{engine['version']}{idle}"))
    return lines


def _cold_weights() -> str:
    """Return how many bytes of weight copies a sweep rotates, and whether they pass the caches."""
    from latbench.backends.cpu.prepare_point import MOST_COPIES, count_cold_bytes
    from latbench.base.number_format import format_bytes
    from sparse_kernels.cpu.codegen.cpu_target import count_rotated_bytes

    most = count_cold_bytes()
    if most < count_rotated_bytes():
        return f"{format_bytes(most)} of copies in rotation, limited by memory: caches may hold them (flag in_cache)"
    return (
        f"{format_bytes(most)} of copies in rotation, which come from memory; copies of a weight below "
        f"{format_bytes(most // MOST_COPIES)} fit into caches (flag in_cache)"
    )


def _gpu_line(gpu: dict[str, Any]) -> str:
    known = [
        ("{}", gpu["device"]),
        ("driver {}", gpu["driver"]),
        ("CUDA {}", gpu["cuda_driver"]),
        ("compute capability {}", gpu["compute_capability"]),
        ("{:.0f} GiB", gpu["gpu_memory_bytes"] and gpu["gpu_memory_bytes"] / 2**30),
        ("{:.2f} GHz", gpu["clock_hertz"] and gpu["clock_hertz"] / 1e9),
        ("at most {:.2f}", gpu["gpu_max_clock_hertz"] and gpu["gpu_max_clock_hertz"] / 1e9),
        ("{:.0f} W", gpu["power_watts"]),
        ("{:.0f} °C", gpu["temperature_celsius"]),
    ]
    return ", ".join(text.format(value) for text, value in known if value is not None)


def _roofline(ceilings: dict[str, Any] | None) -> str:
    """Return operations per second, and bytes per second of the smallest and the largest working set."""
    from latbench.base.number_format import format_bytes

    if ceilings is None:
        return "not measured yet: the first sweep measures it"
    rates = {
        **{f"{dtype} on tensor cores": rate for dtype, rate in ceilings.get("tensor_flop_per_second", {}).items()},
        "float32": ceilings.get("flop_per_second") or ceilings["ordinary_flop_per_second"],
    }
    for name, key in (("bfloat16", "bfloat16_flop_per_second"), ("int8", "int8_op_per_second")):
        if ceilings.get(key, 0.0) > rates["float32"]:
            rates[name] = ceilings[key]
    reads = list(ceilings["read_bytes_per_second"].items())
    return ", ".join(
        [f"{rate / 1e12:.4g} TFLOP/s {name}" for name, rate in rates.items()]
        + [f"reads {rate / 1e9:.4g} GB/s of {format_bytes(held)}" for held, rate in (reads[0], reads[-1])]
    )


def _or_unknown(value: float | None, digits: str) -> str:
    return "unknown" if value is None else format(value, digits)
