#!/usr/bin/env bash
# torch: removing a parametrization from a copy of a module breaks the module that was copied.
#
#   original = weight_norm(Linear(4, 4)); twin = copy.deepcopy(original)
#   remove_parametrizations(twin, "weight")        # the twin is a plain Linear again
#   original(x)                                    # AttributeError: 'ParametrizedLinear' object has no attribute 'weight'
#
# One would expect the original to stay as it was: the twin has parameters of its own. But register_parametrization
# gives the module a class of its own, deepcopy lets the twin share it, and remove_parametrizations deletes the
# property `weight` from that class. It holds for every parametrization (weight_norm, spectral_norm, orthogonal), and
# whichever of the two comes first breaks the other. A tool that makes weights plain in a copy (to export, quantize or
# prune it) breaks the user's model so. To write the computed weight into a new parameter and give the module back the
# class of its base leaves the other alone.
#
# Installs torch 2.13.0 for CPUs in a temporary folder (about 200 MB). Exit code 1: torch behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq numpy torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu

cat > "$folder/show.py" <<'EOF'
import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

print("torch", torch.__version__.partition("+")[0])
for change in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
    original = change(nn.Linear(4, 4)).eval()
    twin = copy.deepcopy(original)
    shared = type(original) is type(twin)
    parametrize.remove_parametrizations(twin, "weight")
    try:
        original(torch.ones(1, 4))
        outcome = "the original works"
    except AttributeError as error:
        outcome = f"the original raises AttributeError: {error}"
    print(f"{change.__name__}: one class: {shared}; the twin is a {type(twin).__name__}; {outcome}")
EOF
found=$("$python" "$folder/show.py")
echo "$found"
broken="one class: True; the twin is a Linear; the original raises AttributeError: 'ParametrizedLinear' object has no attribute 'weight'"
[[ $found == "torch 2.13.0
weight_norm: $broken
spectral_norm: $broken
orthogonal: $broken" ]]
