"""The examples beside a model that was exported to OpenVINO: one in C++, one in Python."""

from collections.abc import Sequence

from search.export.export_manifest import GRAPH, LIBRARY, MANIFEST

PYTHON = f'''"""Run the exported model with OpenVINO alone: python example.py [THREADS]"""

import json
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
graph = core.read_model(folder / "{GRAPH}")
shapes = [each["example"] for each in json.loads((folder / "{MANIFEST}").read_text())["inputs"]]
graph.reshape(dict(enumerate(shapes)))  # it is faster for these sizes alone; without this line it takes others, too
model = core.compile_model(graph, "CPU", settings)

inputs = [np.zeros(shape, port.get_element_type().to_dtype()) for shape, port in zip(shapes, model.inputs)]
for result in model(inputs).values():
    print(result)
'''


def generate_main(shapes: Sequence[Sequence[int]]) -> str:
    """Return the example in C++, which calls the model with zeros of these shapes."""
    listed = ", ".join("{" + ", ".join(map(str, shape)) + "}" for shape in shapes)
    return f"""/* Run the exported model with OpenVINO alone: ./main [THREADS], in the folder of the model.

   OpenVINO comes from its archive, or from a pip package:
   package=$(python -c "import openvino; print(openvino.__path__[0])")
   c++ -std=c++17 -O2 -I$package/include main.cpp -o main $package/libs/libopenvino.so.* -Wl,-rpath,$package/libs */
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <vector>

#include <openvino/openvino.hpp>

int main(int count, char **arguments) {{
    const std::vector<ov::Shape> shapes{{{listed}}};
    try {{
        ov::Core core;
        core.add_extension("./{LIBRARY}"); /* before the model is read */
        /* Without the last setting OpenVINO computes in bfloat16 where the processor can. */
        const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
        std::shared_ptr<ov::Model> graph = core.read_model("{GRAPH}");
        std::map<size_t, ov::PartialShape> sizes; /* faster for these alone; not reshaped, it takes others, too */
        for (size_t i = 0; i < shapes.size(); i++) sizes[i] = shapes[i];
        graph->reshape(sizes);
        ov::CompiledModel model = core.compile_model(graph, "CPU", ov::inference_num_threads(threads),
                                                     ov::hint::inference_precision(ov::element::f32));
        ov::InferRequest request = model.create_infer_request();
        for (size_t i = 0; i < model.inputs().size(); i++) {{
            ov::Tensor input(model.input(i).get_element_type(), shapes[i]);
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
