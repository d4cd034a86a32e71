"""The end of each command's help: two examples and the exit codes."""

from __future__ import annotations

import re
import textwrap

EXAMPLES = {
    "new": (
        "latbench new my_task.py",
        "latbench new my_encoder.py --template text",
    ),
    "check": (
        "latbench check my_task.py",
        "latbench check my_task.py --json",
    ),
    "run": (
        "latbench run my_task.py --target 2 -o job",
        "latbench run digits",
    ),
    "trace": (
        "latbench trace my_task.py -o workload.yaml",
        "latbench trace torchvision.models:resnet18 --input-shape 1x3x224x224",
    ),
    "plan": (
        "latbench plan --workload bert-base,resnet50",
        "latbench plan --gpu h200 --patterns dense,nm:2:4 --json",
    ),
    "sweep": (
        "latbench sweep --cpu --workload workload.yaml -o table",
        "latbench sweep --gpu h200 --quick",
    ),
    "fit": (
        "latbench fit table -o cost_model.json",
        "latbench fit table -o boosted.json --estimator boosted --backend numba",
    ),
    "predict": (
        "latbench predict cost_model.json --table table --pattern vector:32 --sparsity 0.9 --shape 768x768x128",
        "latbench predict cost_model.json --table table --pattern dense --backend numba --kind conv2d "
        "--shape 64x64x3x3 --input 1x56x56 --json",
    ),
    "search": (
        "latbench search my_task.py --target 1.5 --table table --cost-model cost_model.json --database database "
        "-o profile.json",
        "latbench search my_task.py --target 2 --table table --cost-model cost_model.json --database database "
        "-o profile.json --quick --patterns vector:32,nm:2:4",
    ),
    "prune": (
        "latbench prune my_task.py --profile profile.json --database database -o pruned",
        "latbench prune my_task.py --profile profile.json --database database -o pruned --recipe gmp",
    ),
    "verify": (
        "latbench verify my_task.py pruned -o verify",
        "latbench verify my_task.py pruned -o verify --remeasure",
    ),
    "export": (
        "latbench export digits latbench-jobs/digits/pruned -o deploy",
        "latbench export my_task.py pruned -o deploy --batch 1,16 --threads 2,4",
    ),
    "report": (
        "latbench report table --cost-model cost_model.json --profile profile.json --pruned pruned --verify verify",
        "latbench report new_table --against old_table -o comparison.html --figures figures",
    ),
    "solve": (
        "latbench solve timings.txt --target 2 -o profile.txt",
        "latbench solve table --workload workload.yaml --cost-model cost_model.json --backend numba -o frontier.csv",
    ),
    "compare": (
        "latbench compare old_table new_table",
        "latbench compare old_table new_table --threshold 0.05 --fail-on slower,missing",
    ),
    "validate": (
        "latbench validate table",
        "latbench validate bundled://amd-epyc-zen5-2-threads --json",
    ),
    "merge": (
        "latbench merge first_table second_table -o table",
        "latbench merge first_device second_device -o devices --allow-mixed",
    ),
    "import": (
        "latbench import spdy timings.txt -o spdy_table",
        "latbench import neusight timings.csv -o neusight_table --only 'Device=Tesla T4'",
    ),
    "layers": (
        "latbench layers my_task.py -o layer_table",
        "latbench layers my_task.py -o layer_table --sparsities spdy --spdy timings.txt",
    ),
    "doctor": (
        "latbench doctor",
        "latbench doctor --json",
    ),
    "setup": (
        "latbench setup deepsparse",
        "latbench setup deepsparse --remove",
    ),
}  # fmt: skip
"""Two command lines for each command: the usual one, and one with the option that users ask for most."""

EXIT_CODES = {
    0: "done",
    1: "a promise was missed, or --fail-on found something",
    2: "the command line is wrong",
    3: "this machine cannot do it: a device, a library or disk space is missing",
    4: "stopped before the end; the same command continues",
    5: "a file is missing, damaged or of another version",
    70: "a fault of latbench; --verbose shows where",
}

WIDTH = 74  # of a line of an example, within the 80 characters of a help page


def build_epilog(command: str) -> str:
    """Build the text below the options of a command; a line of \\b keeps the lines after it as they are."""
    shown = (_wrap(example) for example in EXAMPLES.get(command, ()))
    codes = (f"  {code:<3} {meaning}" for code, meaning in EXIT_CODES.items())
    return "\n".join(["\b", "Examples:", *shown, "", "\b", "Exit codes:", *codes])


def _wrap(example: str) -> str:
    """Return a command line as indented lines that a shell reads as one."""
    joined = re.sub(r"(\s--?[\w-]+) (?!-)", "\\1\xa0", example)  # an option and its value stay on one line
    lines = textwrap.wrap(joined, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"  {line}" for line in lines).replace("\xa0", " ")
