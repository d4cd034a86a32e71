#!/usr/bin/env bash
# A model that OpenVINO refuses to convert silences the warnings of the whole program.
#
# convert_model sets the level of Python's root logger to ERROR and adds a handler to it, and puts both back at the
# end. Where it raises, it does not. A program that catches the error, and goes on without that model, prints none of
# its warnings from then on, whatever logger they go to. The model here is valid ONNX with an operator of its own
# domain, for which OpenVINO has no conversion.
#
# 100 MB of downloads. Exit code 1: OpenVINO behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq openvino==2026.4.1 onnx==1.22.0 numpy==2.4.6
cd "$folder"

seen=$("$folder/venv/bin/python" - 2>&1 <<'EOF2'
import logging

import onnx
import openvino as ov
from onnx import helper

x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
for kind, domain in (("Sqrt", ""), ("Own", "own.domain")):
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own.domain", 1)]
    graph = helper.make_graph([helper.make_node(kind, ["x"], ["y"], domain=domain)], "one", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), "one.onnx")
    try:
        ov.convert_model("one.onnx")
        said = "converted"
    except Exception as error:
        said = "refused"
    root = logging.getLogger()
    print(f"{kind}: {said}; root logger {logging.getLevelName(root.level)}, {len(root.handlers)} handlers", flush=True)
    logging.getLogger("program").warning(f"a warning after {kind}")
EOF2
)
echo "openvino $("$folder/venv/bin/python" -c 'import openvino; print(openvino.__version__)')"
echo "$seen"
[[ $seen == "Sqrt: converted; root logger WARNING, 0 handlers
a warning after Sqrt
Own: refused; root logger ERROR, 1 handlers" ]]
