#!/usr/bin/env bash
# OpenVINO makes one of two operations that were written in Python, and the results are silently wrong.
#
# The operation here multiplies by a factor that is an attribute of the Python object. A model multiplies its input by
# 2 and by 3, and takes the square roots. One would expect 1.41 and 1.73. Instead both results are 1.41: convert_model
# takes operations of one kind and one input for equal, as it asks only visit_attributes how they differ. That is
# optional, and documented as what serialization needs. Where it tells the factor, the results are right. So are they
# where nothing reads the operations but the results of the model, and where the model is built in Python.
#
# 100 MB of downloads. Exit code 1: OpenVINO behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq openvino==2026.4.1 onnx==1.22.0 numpy==2.4.6
cd "$folder"

seen=$("$folder/venv/bin/python" - <<'EOF2'
import numpy as np
import onnx
import openvino as ov
from onnx import helper
from openvino.frontend.onnx import ConversionExtension


class Scale(ov.Op):
    def __init__(self, inputs, factor):
        super().__init__(self, inputs)
        self.factor = factor
        self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self):
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, inputs):
        return type(self)(inputs, self.factor)

    def has_evaluate(self):
        return True

    def evaluate(self, outputs, inputs):
        outputs[0].shape = inputs[0].shape
        np.multiply(inputs[0].data, self.factor, out=outputs[0].data)
        return True


class TellingScale(Scale):
    def visit_attributes(self, visitor):
        visitor.on_attributes({"factor": self.factor})
        return True


x, y, z = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xyz")
nodes = [
    helper.make_node("Scale", ["x"], ["two"], factor=2.0, domain="own"),
    helper.make_node("Scale", ["x"], ["three"], factor=3.0, domain="own"),
    helper.make_node("Sqrt", ["two"], ["y"]),
    helper.make_node("Sqrt", ["three"], ["z"]),
]
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
graph = helper.make_graph(nodes, "scales", [x], [y, z])
onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), "scales.onnx")
for kind in (Scale, TellingScale):
    kept = []

    def convert(node):
        kept.append(kind([node.get_input(0)], node.get_attribute("factor")))
        return kept[-1].outputs()

    model = ov.convert_model("scales.onnx", extension=ConversionExtension("Scale", "own", convert))
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled(np.ones(1, np.float32))
    print(f"{kind.__name__}: {found[0][0]:.2f} and {found[1][0]:.2f}")
EOF2
)
echo "openvino $("$folder/venv/bin/python" -c 'import openvino; print(openvino.__version__)')"
echo "$seen"
[[ $seen == "Scale: 1.41 and 1.41
TellingScale: 1.41 and 1.73" ]]
