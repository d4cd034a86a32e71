"""The C and Python files of an exported chain: its function, an example of each, and the header of the function."""

from __future__ import annotations

from collections.abc import Iterable

from search.export.c_library.model_chain import ADD, LAYER, ModelChain
from search.export.export_manifest import LIBRARY, PACKED

# Floats to which memory of a value is rounded up, so that each begins at a cache line.
_LINE = 16


def generate_header(chain: ModelChain) -> str:
    """Return the header of the model's function."""
    x, y = chain.count_floats(0), chain.count_floats(chain.result)
    return f"""/* The whole model. Link with {LIBRARY}, and open {PACKED} with latbench_open. */
#ifndef MODEL_H
#define MODEL_H

#include "latbench.h"

enum {{ MODEL_INPUTS = {x}, MODEL_OUTPUTS = {y} }};

#ifdef __cplusplus
extern "C" {{
#endif

/* y (batch, {_format_shape(chain, chain.result)}) from x (batch, {_format_shape(chain, 0)}), float32.
   inputs, outputs: floats of each, as a check. Returns a code. */
LATBENCH_API int latbench_run(latbench_model *model, const float *x, int64_t batch, int64_t inputs, float *y,
                              int64_t outputs, int threads, latbench_error *error);

#ifdef __cplusplus
}}
#endif

#endif
"""


def _format_shape(chain: ModelChain, value: int) -> str:
    return ", ".join(map(str, chain.shapes[value]))


def generate_chain(chain: ModelChain) -> str:
    """Return the C file of the model's function."""
    places, floats = _place_values(chain)
    memory = "".join(f"    float *v{value} = memory + batch * {place};\n" for value, place in places.items())
    most = max(floats, *map(chain.count_floats, range(len(chain.shapes))))
    names = {0: "x", chain.result: "y", **{value: f"v{value}" for value in places}}
    numbers = {layer.name: number for number, layer in enumerate(chain.layers)}
    calls = "".join(
        f"    if (!code) code = {_format_call(chain, number, names, numbers)};\n"
        for number in range(len(chain.steps))
    )
    return f"""#include "model.h"

#include <stdio.h>

int latbench_run(latbench_model *model, const float *x, int64_t batch, int64_t inputs, float *y, int64_t outputs,
                 int threads, latbench_error *error) {{
    if (inputs != MODEL_INPUTS || outputs != MODEL_OUTPUTS) {{
        if (error) {{
            error->code = LATBENCH_BAD_ARGUMENT;
            snprintf(error->text, sizeof error->text, "the model takes %d floats and gives %d, not %lld and %lld",
                     MODEL_INPUTS, MODEL_OUTPUTS, (long long)inputs, (long long)outputs);
        }}
        return LATBENCH_BAD_ARGUMENT;
    }}
    if (batch < 0 || batch > PTRDIFF_MAX / (int64_t)sizeof(float) / {most}) {{
        if (error) {{
            error->code = LATBENCH_BAD_ARGUMENT;
            snprintf(error->text, sizeof error->text, "there cannot be a batch of %lld", (long long)batch);
        }}
        return LATBENCH_BAD_ARGUMENT;
    }}
    float *memory = latbench_borrow(model, batch * {floats}, error);
    if (!memory) return LATBENCH_UNUSABLE;
{memory}    int code = LATBENCH_OK;
{calls}    latbench_give_back(model, memory);
    return code;
}}
"""


def _format_call(chain: ModelChain, number: int, names: dict[int, str], layers: dict[str, int]) -> str:
    step = chain.steps[number]
    sources, target = [names[each] for each in step.inputs], names[step.output]
    if step.kind != LAYER:
        size, second = chain.count_floats(step.output), sources[1] if step.kind == ADD else "NULL"
        return (
            f"latbench_add(model, {sources[0]}, {second}, {target}, batch * {size}, {int(step.relu)}, threads, error)"
        )
    layer, index = chain.layers[layers[step.layer]], layers[step.layer]
    m, k = layer.weight.shape
    if (image := layer.image) is not None:
        size = chain.count_floats(step.output)
        sides = f"{image.c_in}, {image.h}, {image.w}"
        return (
            f"latbench_conv2d(model, {index}, {sources[0]}, batch, {sides}, {target}, batch * {size}, threads, error)"
        )
    tokens = chain.count_floats(step.output) // m
    return f"latbench_linear(model, {index}, {sources[0]}, batch * {tokens}, {k}, {target}, {m}, threads, error)"


def _place_values(chain: ModelChain) -> tuple[dict[int, int], int]:
    """Return where the values between x and the result lie, in floats for each input of a batch, and their sum.

    A value takes the place of one that nobody reads any more.
    """
    last_use = {value: number for number, step in enumerate(chain.steps) for value in step.inputs}
    rooms: list[list[int]] = []  # floats, and the value that lies there
    taken: dict[int, int] = {}
    for number, step in enumerate(chain.steps):
        if step.output != chain.result:
            size = -(-chain.count_floats(step.output) // _LINE) * _LINE
            free = [i for i, (_, value) in enumerate(rooms) if last_use.get(value, -1) < number]
            room = max(free, key=lambda i: rooms[i][0], default=len(rooms))
            if room == len(rooms):
                rooms.append([0, step.output])
            rooms[room] = [max(rooms[room][0], size), step.output]
            taken[step.output] = room
    starts = _add_up(size for size, _ in rooms)
    return {value: starts[room] for value, room in taken.items()}, starts[-1]


def _add_up(sizes: Iterable[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


MAIN = f"""/* Run the model on float32 inputs of a file: ./main inputs.bin outputs.bin [threads]

   cc -O2 -I. main.c -o main -L. -lmodel -Wl,-rpath,'$ORIGIN' */
#include <stdio.h>
#include <stdlib.h>

#include "model.h"

int main(int count, char **arguments) {{
    latbench_error error;
    if (count < 3) return fprintf(stderr, "usage: main INPUTS OUTPUTS [THREADS]\\n"), LATBENCH_BAD_ARGUMENT;
    int threads = count > 3 ? atoi(arguments[3]) : 1;
    const long each = MODEL_INPUTS * (long)sizeof(float);
    FILE *file = fopen(arguments[1], "rb");
    if (!file || fseek(file, 0, SEEK_END)) return perror(arguments[1]), LATBENCH_UNUSABLE;
    const long bytes = ftell(file);
    if (bytes <= 0 || bytes % each)
        return fprintf(stderr, "%s: it has %ld bytes, and must hold whole inputs of %ld bytes\\n",
                       arguments[1], bytes, each), LATBENCH_BAD_FILE;
    const int64_t batch = bytes / each;
    const size_t results = (size_t)batch * MODEL_OUTPUTS;
    rewind(file);
    float *x = malloc((size_t)bytes), *y = malloc(results * sizeof *y);
    if (!x || !y || fread(x, 1, (size_t)bytes, file) != (size_t)bytes) return perror(arguments[1]), LATBENCH_UNUSABLE;
    fclose(file);
    latbench_model *model = latbench_open("{PACKED}", NULL, &error);
    if (!model) return fprintf(stderr, "%s\\n", error.text), error.code;
    int code = latbench_run(model, x, batch, MODEL_INPUTS, y, MODEL_OUTPUTS, threads, &error);
    if (code) return fprintf(stderr, "%s\\n", error.text), code;
    latbench_close(model);
    if (!(file = fopen(arguments[2], "wb")) || fwrite(y, sizeof *y, results, file) != results || fclose(file))
        return perror(arguments[2]), LATBENCH_UNUSABLE; /* also of a full disk, which fclose may find */
    free(x);
    free(y);
    return LATBENCH_OK;
}}
"""


def generate_python_example(chain: ModelChain) -> str:
    """Return a program that calls the model by ctypes, with NumPy alone."""
    x, y = chain.shapes[0], chain.shapes[chain.result]
    return f'''"""Run the exported model from Python: NumPy and ctypes, nothing else."""

import ctypes
from pathlib import Path

import numpy as np

folder = Path(__file__).parent
library = ctypes.CDLL(str(folder / "{LIBRARY}"))
library.latbench_open.restype = ctypes.c_void_p
error = ctypes.create_string_buffer(516)  # a code of 4 bytes, then a text
model = library.latbench_open(str(folder / "{PACKED}").encode(), None, error)
if not model:
    raise SystemExit(error.raw[4:].split(b"\\0")[0].decode())


def run(x: np.ndarray, threads: int = 1) -> np.ndarray:
    """Return the results for x (batch, {", ".join(map(str, x))})."""
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty((len(x), {", ".join(map(str, y))}), np.float32)
    sizes = [ctypes.c_int64(size) for size in (len(x), {chain.count_floats(0)}, {chain.count_floats(chain.result)})]
    x_at, y_at = ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data)
    if library.latbench_run(ctypes.c_void_p(model), x_at, sizes[0], sizes[1], y_at, sizes[2], threads, error):
        raise ValueError(error.raw[4:].split(b"\\0")[0].decode())
    return y


print(run(np.zeros((1, {", ".join(map(str, x))}), np.float32)))
'''
