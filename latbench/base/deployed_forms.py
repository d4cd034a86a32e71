"""Forms in which a pruned model is deployed: as a torch module in Python, or exported."""

PYTHON, C, OPENVINO, TORCH_PACKAGE = "python", "c", "openvino", "torch"

EXPORTED_FORMS = (OPENVINO, TORCH_PACKAGE, C)

FORM_PHRASES = {
    PYTHON: "",
    OPENVINO: " exported to OpenVINO",
    TORCH_PACKAGE: " exported to a package of torch",
    C: " exported to C",
}
"""Words to follow a time of a pruned model in this form."""
