"""Forms in which a pruned model is deployed: as a torch module in Python, or exported."""

PYTHON, C, OPENVINO = "python", "c", "openvino"

EXPORTED_FORMS = (OPENVINO, C)

FORM_PHRASES = {PYTHON: "", C: " exported to C", OPENVINO: " exported to OpenVINO"}
"""Words to follow a time of a pruned model in this form."""
