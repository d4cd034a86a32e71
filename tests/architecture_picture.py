"""Draw which room imports which, from the imports of the code: a Mermaid graph for docs/explanation/architecture.md.

    python -P tests/architecture_picture.py

An arrow that follows from others is left out. `tests/test_architecture.py` holds the page against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

import grimp

PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
SHALLOW = ("cost_models", "sparse_kernels")
"""Packages that the picture shows as one room."""


def find_room(module: str) -> str | None:
    """Return the room of a module: its package and the folder below; None for files right in a package."""
    package, _, rest = module.partition(".")
    if package in SHALLOW:
        return package
    return f"{package}.{rest.partition('.')[0]}" if rest else None


def find_arrows() -> dict[str, set[str]]:
    """Return for each room the rooms that it imports."""
    graph = grimp.build_graph(*PACKAGES)
    rooms = {name for package in PACKAGES for name in graph.find_children(package) if graph.find_children(name)}
    arrows: dict[str, set[str]] = {
        room: set() for room in {*rooms, *SHALLOW} if room.partition(".")[0] not in SHALLOW
    }
    arrows |= {package: set() for package in SHALLOW}
    for module in graph.modules:
        importer = find_room(module)
        for imported in graph.find_modules_directly_imported_by(module):
            room = find_room(imported)
            if importer in arrows and room in arrows and room != importer:
                arrows[importer].add(room)
    return arrows


def remove_implied(arrows: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return the arrows without those that a longer way implies (the transitive reduction; there is no circle)."""
    reached: dict[str, set[str]] = {}
    for room in TopologicalSorter(arrows).static_order():
        reached[room] = set().union(*({it} | reached[it] for it in arrows[room]))
    return {
        room: sorted(it for it in beyond if not any(it in reached[other] for other in beyond if other != it))
        for room, beyond in sorted(arrows.items())
    }


def draw() -> str:
    """Return the Mermaid text."""
    arrows = remove_implied(find_arrows())
    lines = ["graph TD"]
    for package in PACKAGES:
        if package in SHALLOW:
            lines.append(f"    {package}[{package}]")
            continue
        lines.append(f"    subgraph {package}")
        inside = [room for room in arrows if room.startswith(f"{package}.")]
        lines += [f"        {room.replace('.', '_')}[{room.partition('.')[2]}]" for room in inside]
        lines.append("    end")
    for room, beyond in arrows.items():
        lines += [f"    {room.replace('.', '_')} --> {it.replace('.', '_')}" for it in beyond]
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw())
