"""Stands for DeepSparse's native module: a model file is JSON that says how the fake behaves."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np


class deepsparse_engine:
    def __init__(self, model, batch, threads, streams, scheduler, context, debug=None, *analysis):
        print("DeepSparse, Copyright", flush=True)
        assert os.environ["NM_DISABLE_ANALYTICS"] == "1"
        assert os.environ["NM_VERSION_CHECK"] == "false"
        self.model = json.loads(Path(model).read_text())
        self.facts = np.array([batch, threads])
        self.analysis = analysis
        if "refuses" in self.model:
            raise RuntimeError(self.model["refuses"])
        if "dies" in self.model:
            print(self.model["dies"], file=sys.stderr, flush=True)
            os.abort()

    def execute_list_out(self, inputs):
        time.sleep(self.model.get("seconds", 0))
        return [np.full(2, sum(x.sum() for x in inputs), np.float32), self.facts]

    def benchmark_execute(self, inputs, _):
        calls, warm_calls, _, _, sparsity = self.analysis
        name = "gemm_3" if sparsity is None else f"ks_gemm_hyb-{100 * sparsity:.1f}%_3"
        unfused = os.environ.get("WAND_OPT_FLAGS") == "default,~pyramids"
        layers = [
            {"name": name, "canonical_name": "/fc1/Gemm_output_0", "kernel_sparsity": sparsity or 0.0,
             "average_run_time_in_ms": 2.0},
            {"name": "pyramid_12", "canonical_name": "/a_output_0,/b_output_0" if unfused else "fused",
             "kernel_sparsity": 0.0, "average_run_time_in_ms": float(calls + warm_calls)},
        ]  # fmt: skip
        return [None], {"layer_info": layers}
