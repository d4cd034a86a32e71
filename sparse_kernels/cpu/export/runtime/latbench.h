/* Run the sparse layers of an exported model, without Python.
 *
 * A model is opened from its packed file and holds no state that a caller sees. Any number of threads may call it at
 * once: each call has scratch memory and threads of its own, which later calls take over. A process may fork after it
 * has opened a model, and parent and child go on with it. The library has no state of its own but a count of forks.
 *
 * Every function that can fail says why in `error`, which may be NULL. Results must not overlap what is read.
 */
#ifndef LATBENCH_H
#define LATBENCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LATBENCH_API __attribute__((visibility("default")))

typedef struct latbench_model latbench_model;

enum latbench_code {
    LATBENCH_OK = 0,
    LATBENCH_BAD_ARGUMENT = 2, /* a wrong shape, layer or number of threads */
    LATBENCH_UNUSABLE = 3,     /* this machine lacks the CPU level, memory or the file */
    LATBENCH_BAD_FILE = 5,     /* the packed file is damaged, or of another version or library */
    LATBENCH_FAULT = 70        /* a kernel failed: please report it */
};

typedef struct latbench_error {
    int code;
    char text[512]; /* one sentence */
} latbench_error;

enum latbench_kind { LATBENCH_LINEAR = 1, LATBENCH_CONV2D = 2 };

/* A layer. Of a linear layer outputs and inputs are features; of a convolution x and y are channels, height, width. */
typedef struct latbench_layer {
    const char *name;
    int kind;
    int64_t outputs, inputs;
    int64_t x[3], y[3];
} latbench_layer;

/* Open the packed file at a path. level: the name of a CPU level of the file; NULL takes the most able one that this
 * machine has. NULL on failure. The file must not be written to while it is open: put another in its place instead. */
LATBENCH_API latbench_model *latbench_open(const char *path, const char *level, latbench_error *error);

/* Close a model that nobody calls any more. NULL is fine. */
LATBENCH_API void latbench_close(latbench_model *model);

/* Runs run(job, part) for each part from 0 on, `threads` at the same time at most, and returns once all are done. */
typedef void (*latbench_share)(void *context, void (*run)(void *job, int64_t part), void *job, int64_t parts,
                               int threads);

/* Let `share` run the parts of each call, in place of threads of the library's own; NULL takes these again. For programs
 * with threads of their own. Not while a call is under way. */
LATBENCH_API void latbench_set_share(latbench_model *model, latbench_share share, void *context);

/* The name of the CPU level in use. */
LATBENCH_API const char *latbench_level(const latbench_model *model);

LATBENCH_API int latbench_count_layers(const latbench_model *model);

/* Describe layer number `layer`. Returns a code. */
LATBENCH_API int latbench_describe(const latbench_model *model, int layer, latbench_layer *found,
                                   latbench_error *error);

/* The number of the layer of this name; -1 if there is none. */
LATBENCH_API int latbench_find(const latbench_model *model, const char *name);

/* The name of the kernel that runs this number of tokens or images; NULL if there is no such layer. */
LATBENCH_API const char *latbench_kernel(const latbench_model *model, int layer, int64_t size, int threads);

/* y (tokens, outputs) = activation(x (tokens, features) w' + bias). Any number of tokens. Returns a code. */
LATBENCH_API int latbench_linear(latbench_model *model, int layer, const float *x, int64_t tokens, int64_t features,
                                 float *y, int64_t outputs, int threads, latbench_error *error);

/* y = activation(convolution of x + bias), images x (batch, channels, height, width) of the exported size. y_size: the
 * floats that y has room for. Any number of images. Returns a code. */
LATBENCH_API int latbench_conv2d(latbench_model *model, int layer, const float *x, int64_t batch, int64_t channels,
                                 int64_t height, int64_t width, float *y, int64_t y_size, int threads,
                                 latbench_error *error);

/* y = a + b, or max(a + b, 0) if relu; b NULL adds nothing. y may be a or b. Returns a code. */
LATBENCH_API int latbench_add(latbench_model *model, const float *a, const float *b, float *y, int64_t size, int relu,
                              int threads, latbench_error *error);

/* Memory for `floats` floats, at a cache line, with anything in it; later calls take it over. NULL on failure. */
LATBENCH_API float *latbench_borrow(latbench_model *model, int64_t floats, latbench_error *error);

/* Give back what latbench_borrow gave. NULL is fine. */
LATBENCH_API void latbench_give_back(latbench_model *model, float *memory);

#ifdef __cplusplus
}
#endif

#endif
