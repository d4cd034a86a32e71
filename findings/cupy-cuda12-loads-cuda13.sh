#!/usr/bin/env bash
# CuPy for CUDA 12 uses the libraries and headers of CUDA 13 wherever a wheel of CUDA 13 is installed.
#
# Here nvidia-cuda-runtime (CUDA 13) is installed beside nvidia-cuda-runtime-cu12, as torch 2.11 or later brings it.
# One would expect cupy-cuda12x to go on with the wheel for CUDA 12. Instead its runtime becomes 13.0, and it would
# compile kernels with CUDA 13's headers. The reason: cuda-pathfinder, which CuPy asks, does not know for which CUDA
# CuPy is built, and looks for CUDA 13 first. Larger wheels are not installed here, but behave alike: beside
# nvidia-cublas every product fails with "ImportError: libcublas.so.12" although nvidia-cublas-cu12 is installed, and
# beside nvidia-cuda-nvrtc kernels are compiled by NVRTC 13, which no longer knows Volta. (See cupy/cupy#9827.)
#
# 165 MB of downloads, no GPU. Exit code 1: CuPy behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python=$folder/venv/bin/python

seen() {
    CUPY_CACHE_DIR="$folder/cache" "$python" - <<'EOF'
import os
import cupy
from cupy._core import core

headers = core.assemble_cupy_compiler_options(())[-1]
print(f"runtime {cupy.cuda.get_local_runtime_version()}, headers nvidia/{headers.split(os.sep)[-2]}")
EOF
}

"$python" -m pip install -qq cupy-cuda12x==14.2.0 cuda-pathfinder==1.9.0 nvidia-cuda-runtime-cu12==12.8.90 numpy==2.4.6
echo "cupy-cuda12x $("$python" -c 'import cupy; print(cupy.__version__)')"
alone=$(seen)
echo "with nvidia-cuda-runtime-cu12 12.8.90: $alone"
"$python" -m pip install -qq nvidia-cuda-runtime==13.0.96
beside=$(seen)
echo "and nvidia-cuda-runtime 13.0.96:       $beside"
[[ $alone == "runtime 12080, headers nvidia/cuda_runtime" ]]
[[ $beside == "runtime 13000, headers nvidia/cu13" ]]
