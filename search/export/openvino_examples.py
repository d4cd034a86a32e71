"""The examples beside a model that was exported to OpenVINO: one in C++, one in Python."""

from search.export.export_manifest import GRAPH, LIBRARY

PYTHON = f'''"""Run the exported model with OpenVINO alone: python example.py [THREADS]"""

import sys
from pathlib import Path

import numpy as np
import openvino

folder = Path(__file__).parent
core = openvino.Core()
core.add_extension(str(folder / "{LIBRARY}"))  # before the model is read
# Without the last setting OpenVINO computes in bfloat16 where the processor can.
threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
settings = {{"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}}
model = core.compile_model(core.read_model(folder / "{GRAPH}"), "CPU", settings)

inputs = []
for port in model.inputs:  # 1 where a side may be any, as the batch
    sides = [1 if side.is_dynamic else side.get_length() for side in port.get_partial_shape()]
    inputs.append(np.zeros(sides, port.get_element_type().to_dtype()))
for result in model(inputs).values():
    print(result)
'''

MAIN = f"""/* Run the exported model with OpenVINO alone: ./main [THREADS], in the folder of the model.

   OpenVINO comes from its archive, or from a pip package:
   package=$(python -c "import openvino; print(openvino.__path__[0])")
   c++ -std=c++17 -O2 -I$package/include main.cpp -o main $package/libs/libopenvino.so.* -Wl,-rpath,$package/libs */
#include <cstdlib>
#include <cstring>
#include <iostream>

#include <openvino/openvino.hpp>

int main(int count, char **arguments) {{
    try {{
        ov::Core core;
        core.add_extension("./{LIBRARY}"); /* before the model is read */
        /* Without the last setting OpenVINO computes in bfloat16 where the processor can. */
        const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
        ov::CompiledModel model = core.compile_model("{GRAPH}", "CPU", ov::inference_num_threads(threads),
                                                     ov::hint::inference_precision(ov::element::f32));
        ov::InferRequest request = model.create_infer_request();
        for (size_t i = 0; i < model.inputs().size(); i++) {{
            ov::Shape shape;
            for (const ov::Dimension &side : model.input(i).get_partial_shape()) /* 1 where a side may be any */
                shape.push_back(side.is_dynamic() ? 1 : side.get_length());
            ov::Tensor input(model.input(i).get_element_type(), shape);
            std::memset(input.data(), 0, input.get_byte_size());
            request.set_input_tensor(i, input);
        }}
        request.infer();
        for (size_t i = 0; i < model.outputs().size(); i++) {{
            const ov::Tensor result = request.get_output_tensor(i);
            std::cout << "result " << i << " " << result.get_shape();
            for (size_t j = 0; j < result.get_size() && j < 8 && result.get_element_type() == ov::element::f32; j++)
                std::cout << " " << result.data<float>()[j];
            std::cout << std::endl;
        }}
    }} catch (const std::exception &error) {{
        std::cerr << error.what() << std::endl;
        return 1;
    }}
}}
"""
