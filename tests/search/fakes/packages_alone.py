"""A folder with a few installed packages, and what they require: nothing else can be imported from it."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def link_packages(folder: Path, *names: str) -> Path:
    """Fill the folder with links to these distributions and to all that they require; return it."""
    folder.mkdir()
    wanted, seen = list(names), set()
    while wanted:
        name = wanted.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        for top in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
        required = [each for each in found.requires or [] if "extra ==" not in each]
        wanted += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required]
    return folder


def build_lonely_program(packages: Path, program: str) -> list[str]:
    """Return the arguments of a Python that runs a program with these packages alone."""
    return ["-I", "-S", "-c", f"import sys\nsys.path.append({str(packages)!r})\n{program}"]
