"""The examples beside a model that was exported to a package of torch: one in C++, one in Python."""

from collections.abc import Sequence

from torch import Tensor

from search.export.export_manifest import LIBRARY, MANIFEST, PACKAGE

PYTHON = f'''"""Run the exported model with torch alone: python example.py [THREADS]"""

import json
import sys
from pathlib import Path

import torch
from torch._inductor import aoti_load_package

folder = Path(__file__).parent
torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
torch.ops.load_library(folder / "{LIBRARY}")  # before the package is loaded
model = aoti_load_package(str(folder / "{PACKAGE}"))

ports = json.loads((folder / "{MANIFEST}").read_text())["inputs"]
inputs = [torch.zeros(port["example"], dtype=getattr(torch, port["type"])) for port in ports]
with torch.inference_mode():
    for result in model(*inputs):
        print(result)
'''


def generate_main(tensors: Sequence[Tensor]) -> str:
    """Return the example in C++, which calls the model with zeros of the shapes and types of these tensors."""
    types = {"float32": "torch::kFloat", "int64": "torch::kLong", "int32": "torch::kInt", "bool": "torch::kBool"}
    listed = ", ".join(
        "torch::zeros({" + ", ".join(map(str, each.shape)) + "}, "
        + types.get(str(each.dtype).removeprefix("torch."), "torch::kFloat") + ")"
        for each in tensors
    )  # fmt: skip
    return f"""/* Run the exported model with libtorch alone: ./main [THREADS], in the folder of the model.

   libtorch comes from its archive, or from a pip package:
   package=$(python -c "import torch; print(torch.__path__[0])")
   c++ -std=c++20 -O2 -I$package/include -I$package/include/torch/csrc/api/include main.cpp -o main \\
       -L$package/lib -ltorch -ltorch_cpu -lc10 -ldl -Wl,-rpath,$package/lib */
#include <dlfcn.h>

#include <cstdlib>
#include <iostream>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int count, char **arguments) {{
    try {{
        torch::set_num_threads(count > 1 ? std::atoi(arguments[1]) : 1);
        if (!dlopen("./{LIBRARY}", RTLD_NOW)) throw std::runtime_error(dlerror()); /* before the package is loaded */
        torch::inductor::AOTIModelPackageLoader model("{PACKAGE}");
        c10::InferenceMode mode;
        const std::vector<at::Tensor> results = model.run({{{listed}}});
        for (size_t i = 0; i < results.size(); i++) {{
            std::cout << "result " << i << " " << results[i].sizes();
            const at::Tensor values = results[i].flatten();
            for (int64_t j = 0; j < values.numel() && j < 8; j++) std::cout << " " << values[j].item<double>();
            std::cout << std::endl;
        }}
    }} catch (const std::exception &error) {{
        std::cerr << error.what() << std::endl;
        return 1;
    }}
}}
"""
