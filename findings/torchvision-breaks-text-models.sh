#!/usr/bin/env bash
# transformers: with PyPI's torchvision beside torch for CPUs, no model of text can be imported.
#
#   pip install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu     # 2.13.0+cpu
#   pip install torchvision==0.28.0 transformers==5.23.0                                 # keeps torch, pip check is content
#   from transformers import LlamaForCausalLM
#     ModuleNotFoundError: Could not import module 'LlamaForCausalLM'. Are this object's requirements defined correctly?
#
# One would expect Llama, which sees no image, to need no torchvision; without that package it can be imported. The
# cause is three steps away: PyPI's torchvision is built for torch with CUDA ("operator torchvision::nms does not
# exist"), torchvision==0.28.0 asks for torch==2.13.0, which 2.13.0+cpu is, and transformers imports torchvision for
# every model wherever it is installed. torchvision from the index of torch's CPU builds, or none, helps.
#
# 450 MB of downloads, no GPU. Exit code 1: the packages behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq numpy torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
"$python" -m pip install -qq transformers==5.23.0

outcome() {
    "$python" -c 'from transformers import LlamaForCausalLM; print("imported")' 2>&1 | tail -1
}

without=$(outcome)
"$python" -m pip install -qq torchvision==0.28.0
checked=$("$python" -m pip check)
with=$(outcome || true)
cause=$("$python" -c 'import torchvision' 2>&1 | tail -1 || true)
"$python" -m pip list 2>/dev/null | grep -E '^(torch|torchvision|transformers) '
echo "without torchvision: $without"
echo "with torchvision:    $with"
echo "pip check:           $checked"
echo "import torchvision:  $cause"
[[ $without == "imported" ]]
[[ $checked == "No broken requirements found." ]]
[[ $with == "ModuleNotFoundError: Could not import module 'LlamaForCausalLM'."* ]]
[[ $cause == "RuntimeError: operator torchvision::nms does not exist" ]]
