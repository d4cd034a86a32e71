#!/usr/bin/env bash
# pip: the order of two names decides for which CUDA torch is built.
#
#   pip install torch 'cupy-cuda13x[ctk]'   torch 2.14.1, for CUDA 13.0
#   pip install 'cupy-cuda13x[ctk]' torch   torch 2.10.0, for CUDA 12.8, beside the libraries of CUDA 13.5
#
# One would expect the newest torch either way: torch 2.14.1 and CuPy agree on cuda-toolkit 13.0.3. But torch 2.11 and
# later pin cuda-toolkit exactly, and [ctk] allows every 13.*. In the second order pip takes the newest toolkit first.
# All torch that pin another are then passed over, down to 2.10, which is older than its dependency on cuda-toolkit.
# A project whose requirements name both gets the second result as well: pip sorts those by name. An upper bound of
# cuda-toolkit, or a lower one of torch, prevents it.
#
# Only metadata is read, nothing but pip is installed: a few MB. Exit code 1: pip resolves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq pip==26.3

# The newest of their time. torch 2.13.0 is left out: where a CPU build of it is at hand, pip takes that.
cat > "$folder/constraints.txt" <<'EOF'
cuda-toolkit<=13.5.0
cupy-cuda13x==14.2.0
torch<=2.14.1,!=2.13.0
EOF

resolved() {
    timeout 300 "$python" -m pip install -qq --dry-run -c "$folder/constraints.txt" --report "$folder/report.json" "$@"
    "$python" - "$folder/report.json" <<'EOF'
import json, sys
found = {each["metadata"]["name"]: each["metadata"]["version"] for each in json.load(open(sys.argv[1]))["install"]}
shown = ("torch", "cuda-toolkit", "nvidia-cublas", "nvidia-cublas-cu12")
print(", ".join(f"{name} {found[name]}" for name in shown if name in found))
EOF
}

"$python" -m pip --version | cut -d' ' -f1-2
torch_first=$(resolved torch 'cupy-cuda13x[ctk]')
cupy_first=$(resolved 'cupy-cuda13x[ctk]' torch)
echo "pip install torch 'cupy-cuda13x[ctk]': $torch_first"
echo "pip install 'cupy-cuda13x[ctk]' torch: $cupy_first"
[[ $torch_first == "torch 2.14.1, cuda-toolkit 13.0.3.0, nvidia-cublas 13.1.1.3" ]]
[[ $cupy_first == "torch 2.10.0, cuda-toolkit 13.5.0, nvidia-cublas 13.10.0.20, nvidia-cublas-cu12 12.8.4.1" ]]
